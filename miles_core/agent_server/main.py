"""`miles-agent-server`: the command that starts the agent server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fcntl
import importlib.metadata
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

from miles_core.agent_server import environments
from miles_core.agent_server.arguments import SECRET, check, parser
from miles_core.agent_server.interpreter import check_interpreter
from miles_core.agent_server.reaper import command
from miles_core.agent_server.reaper.owner import open_owner
from miles_core.errors import UserError
from miles_core.serving import (
    PortInUse,
    bind,
    exit_status,
    url_of,
    watch_parent,
    write_ready_file,
)

GIGABYTE = 1e9
LOCK_WAIT_S = 5.0
"""How long a server that is just ending may still hold its trials directory."""


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.sweep:
            return command.sweep(args.trials_dir, args.sweep == "now")
        check_interpreter()
        check(args)
        listener = bind(args.host, args.port, "--port")
        return run(args, listener, bind_dashboard(args.host, args.dashboard_port))
    except UserError as error:
        print(f"miles-agent-server: {error}", file=sys.stderr)
        return exit_status(error)


def bind_dashboard(host: str, port: int) -> socket.socket | None:
    """The listening socket of the dashboard, where 0 means that there is none; raises UserError."""
    if port == 0:
        return None
    try:
        return bind(host, port, "--dashboard-port")
    except PortInUse as error:
        fix = "Choose another with --dashboard-port, or leave it out: then there is no page."
        raise PortInUse(error.message, fix) from error


def _unwritable(directory: Path, error: OSError) -> UserError:
    problem = f"--trials-dir {directory}: {error.strerror or error}"
    return UserError(problem, "The server has to write there.")


def lock_trials(directory: Path) -> IO[str]:
    """A lock on a trials directory, held until the file is closed; raises UserError.

    A second server would end the trials of the first one as those of a server that died.
    """
    try:
        lock = open(directory / ".lock", "a")  # noqa: SIM115 (it is held while the server runs)
    except OSError as error:
        raise _unwritable(directory, error) from error
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                message = f"--trials-dir {directory}: another agent server works in it"
                raise UserError(message, "Choose another one.") from None
            time.sleep(0.1)


def run(args: argparse.Namespace, listener: socket.socket, dashboard: socket.socket | None) -> int:
    """Load Harbor, prepare the sandboxes, serve until a signal; the exit status."""
    sandbox = environments.find(args.sandbox)
    if args.images != "host" and not sandbox.ours:
        raise UserError(
            f"--images {args.images}: Harbor builds the images of {sandbox.name} itself"
        )
    environments.check_host(sandbox)
    lock = lock_trials(args.trials_dir.resolve())
    from miles_core.agent_server.runner import Runner, quiet_libraries

    quiet_libraries(args.trials_dir)
    from miles_core.agent_server.agents import AGENTS, load_agent_config
    from miles_core.agent_server.inside.seccomp import missing as no_filter
    from miles_core.agent_server.sandbox.cgroups import CgroupTree
    from miles_core.agent_server.sandbox.images import open_images
    from miles_core.agent_server.settings import ServerSettings

    try:
        agent_config = load_agent_config(args.agent_config)
    except ValueError as error:
        raise UserError(f"--agent-config: {error}") from error
    settings = ServerSettings(
        tasks_dir=args.tasks_dir.resolve(),
        trials_dir=args.trials_dir.resolve(),
        agent_timeout_s=args.agent_timeout,
        max_concurrent=args.max_concurrent,
        sandbox=sandbox,
        agent_config=agent_config,
    )
    images = tree = None
    try:
        owner = open_owner(settings.trials_dir, sandbox.kind)
        if sandbox.ours:
            limit = int(args.images_cache_gb * GIGABYTE)
            images = open_images(settings.trials_dir, args.images, limit)
        else:
            environments.own_scratch(settings.trials_dir)
    except OSError as error:
        raise _unwritable(settings.trials_dir, error) from error
    settings = dataclasses.replace(settings, owner=owner)
    if sandbox.ours:
        tree = CgroupTree()
    runner = Runner(settings, images, tree)
    health: dict[str, Any] = {
        "capacity": settings.max_concurrent,
        "sandbox": sandbox.name,
        "images": args.images if sandbox.ours else "",
        "limits": {**tree.limits, "seccomp": no_filter() or "filter"} if tree else {},
        "harbor_version": importlib.metadata.version("harbor"),
        "agent_timeout_s": settings.agent_timeout_s,
        "trial_timeout_s": settings.trial_timeout_s,
        "tasks_dir": str(settings.tasks_dir),
        "agents": list(AGENTS),
    }
    try:
        asyncio.run(_serve(args, settings, runner, health, listener, dashboard))
    finally:
        if tree is not None:
            tree.close()
        lock.close()
    return 0


async def _serve(
    args: argparse.Namespace,
    settings: Any,
    runner: Any,
    health: dict[str, Any],
    listener: socket.socket,
    dashboard: socket.socket | None,
) -> None:
    import uvicorn

    from miles_core.agent_server.app import make_app, make_dashboard, make_view
    from miles_core.agent_server.reaper.reaper import open_reaper
    from miles_core.agent_server.retention import Retention
    from miles_core.agent_server.sandbox.errors import SandboxError
    from miles_core.agent_server.trials import TrialManager

    try:
        await runner.open()
    except SandboxError as error:
        raise UserError(str(error)) from error
    manager = TrialManager(runner, settings.trials_dir, settings.max_concurrent)
    lost = manager.open()
    retention = Retention(settings.trials_dir, args.keep_trials)
    retention.open(lost)
    manager.watchers.append(lambda record: retention.ended(record.trial_id))
    manager.given.append(retention.given)
    if lost:
        print(f"ended {len(lost)} trials that an earlier server left: server_restarted")
    lifetime = settings.trial_timeout_s
    reaper = await open_reaper(settings.owner, manager.ids, lifetime, runner.cgroups)
    token = os.environ.get(SECRET) or None
    app = make_app(settings, manager, health, token, args.host)
    servers = [_server(uvicorn, app)]
    sockets = [listener]
    if dashboard is not None:
        view = make_view(settings, manager, retention, health)
        servers.append(_server(uvicorn, make_dashboard(app, settings, view, token, args.host)))
        sockets.append(dashboard)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    serving = [
        asyncio.create_task(server._serve(sockets=[place]))
        for server, place in zip(servers, sockets, strict=True)
    ]
    while not all(server.started for server in servers):  # noqa: ASYNC110 (a flag of uvicorn's)
        await asyncio.sleep(0.01)
    if args.parent_pid is not None:
        watch_parent(args.parent_pid, lambda: loop.call_soon_threadsafe(stop.set))
    unready = _announce(args, listener, dashboard, settings.sandbox.name)
    if unready is not None:
        stop.set()
    await asyncio.wait(
        [asyncio.create_task(stop.wait()), *serving], return_when=asyncio.FIRST_COMPLETED
    )
    await manager.close()
    await reaper.close()
    await retention.close()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*serving)
    runner.close()
    if unready is not None:
        raise unready


def _announce(
    args: argparse.Namespace, listener: socket.socket, dashboard: socket.socket | None, sandbox: str
) -> UserError | None:
    """Tell where the server serves; the error when the ready file cannot be written."""
    host, port = listener.getsockname()[:2]
    try:
        if args.ready_file is not None:
            write_ready_file(args.ready_file, host, port)
    except UserError as error:
        return error
    print(f"agent server on {url_of(host, port)}, sandbox {sandbox}", flush=True)
    if dashboard is not None:
        print(f"dashboard on {url_of(*dashboard.getsockname()[:2])}/", flush=True)
    return None


def _server(uvicorn: Any, app: Any) -> Any:
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5, access_log=False
    )
    return uvicorn.Server(config)


if __name__ == "__main__":
    sys.exit(main())
