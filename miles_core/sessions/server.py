"""Entry point of a session server: `python -m miles_core.sessions.server`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import ipaddress
import json
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn

from miles_core.errors import UserError
from miles_core.sessions.app import SessionApp
from miles_core.sessions.chat import ChatService
from miles_core.sessions.engine_call import EngineCaller
from miles_core.sessions.families import FAMILIES, load_family

log = logging.getLogger("miles.sessions")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m miles_core.sessions.server",
        description="Serve token-exact chat sessions over rollout engines",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=0, help="port; 0: the kernel chooses")
    parser.add_argument("--ready-file", type=Path, help="written when the server can serve")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="checkpoint directory with tokenizer.json"
    )
    parser.add_argument(
        "--engine-url", action="append", required=True, help="engine or router; repeatable"
    )
    parser.add_argument(
        "--chat-family", default="auto", help=f"chat family: auto, {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--engine-timeout", type=float, default=1800.0, help="seconds that a model call may take"
    )
    return parser.parse_args(argv)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; a port in use is a `UserError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} of {host} is in use", "Choose another with --port (0: any)."
            ) from error
        raise UserError(f"cannot bind {host}: {error.strerror}", "See --host.") from error
    return sock


def write_ready_file(path: Path, host: str, port: int) -> None:
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(
        json.dumps({"pid": os.getpid(), "host": host, "port": port, "url": url}), "utf-8"
    )
    os.replace(temporary, path)


def process_start(pid: int) -> str | None:
    """When process `pid` started, in clock ticks; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Server(uvicorn.Server):
    """Uvicorn that writes the ready file and ends with its parent."""

    ready_file: Path | None = None
    parent_pid: int | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit or not sockets:
            return
        if self.parent_pid is not None:
            self._watch = asyncio.create_task(self._watch_parent(self.parent_pid))
        if self.ready_file is not None:
            host, port = sockets[0].getsockname()[:2]
            write_ready_file(self.ready_file, host, port)

    async def _watch_parent(self, pid: int) -> None:
        started = process_start(pid)
        while started is not None and process_start(pid) == started:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        log.warning("process %d is gone: ending", pid)
        self.should_exit = True


def _check_exposure(host: str, token: str | None) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and token is None:
        raise UserError(
            f"a session server on {host} needs a token for its control routes",
            "Set MILES_SESSION_TOKEN.",
        )


def serve(args: argparse.Namespace) -> None:
    token = os.environ.get("MILES_SESSION_TOKEN") or None
    _check_exposure(args.host, token)
    sock = bind(args.host, args.port)
    family = load_family(args.tokenizer, args.chat_family)
    log.info("chat family %s, stop tokens %s", family.name, family.stop_token_ids)
    chat = ChatService(family, EngineCaller(args.engine_url, args.engine_timeout))
    config = uvicorn.Config(
        SessionApp(chat, token).starlette(),
        # Paths hold the secrets of sessions, so requests are not logged.
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
    )
    server = Server(config)
    server.ready_file, server.parent_pid = args.ready_file, args.parent_pid
    server.run(sockets=[sock])


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        serve(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
