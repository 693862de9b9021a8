"""Harbor's docker and podman environments, as the trials of this server need them.

They are Harbor's own but for four things: their names say whose they are, so that what is left
behind can be found; what a cancelled call has started on this host is ended with it; a container
takes one second to end and not ten; and a task without a network gets none from the engine, where
Harbor starts a second container beside it whose image it builds from the internet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, override

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import ExecResult, OutputCallback
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.podman import PodmanEnvironment
from harbor.models.task.config import NetworkMode, NetworkPolicy

from miles_core.agent_server.clients import end_client
from miles_core.agent_server.reaper.owner import Owner
from miles_core.agent_server.sandbox.environment import TESTS
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxGone
from miles_core.agent_server.sandbox.host import VERIFIER_LOGS

COMPOSE = "docker-compose.yaml"
SERVICE = "com.docker.compose.service"
CACHE = "localhost/miles-cache"
CACHE_DIGITS = 32
NO_USER = "no matching entries in passwd file"
"""What both engines say of a user that the image does not have."""
ENGINE_FAILED = (125, 126, 137, 255)
"""Exit statuses of an engine that could not run a command, or whose container ended meanwhile."""
CLEAR = """set -e
shopt -s nullglob dotglob
for place in /logs "$@"; do
  [ -d "$place" ] && [ ! -L "$place" ] || { rm -f -- "$place"; mkdir -- "$place"; }
done
for place in "$@"; do
  rm -rf -- "$place"/*
  chmod 777 -- "$place"
done"""
"""Empties folders and keeps them, for one may be mounted."""
OUTPUT_LIMIT = 8 << 20
GRACE_S = "1"
"""Between SIGTERM and SIGKILL of a container: the first process is a sleep that heeds none."""

CONTAINERS: dict[str, list[ContainerEnvironment]] = {}
"""The environments of this process's trials, by trial id."""


class ContainerEnvironment(DockerEnvironment):
    """What the environments of both engines have in common."""

    def __init__(
        self,
        *args: Any,
        environment_dir: Path,
        trial_id: str,
        owner: str,
        session_id: str,
        network_policy: NetworkPolicy | None = None,
        phase_network_policies: Sequence[NetworkPolicy] = (),
        **kwargs: Any,
    ) -> None:
        policies = [network_policy, *phase_network_policies]
        services = kwargs.get("extra_docker_compose") or (environment_dir / COMPOSE).exists()
        self._severed = not services and all(
            policy is not None and policy.network_mode is NetworkMode.NO_NETWORK
            for policy in policies
        )
        super().__init__(
            *args,
            environment_dir=environment_dir,
            session_id=Owner(owner).name(trial_id, session_id),
            network_policy=network_policy,
            phase_network_policies=phase_network_policies,
            **kwargs,
        )
        self._main: str | None = None
        self.running = False
        """Whether its containers have come up and were not ended."""
        CONTAINERS.setdefault(trial_id, []).append(self)

    @override
    def _requires_egress_control(self, **policies: Any) -> bool:  # type: ignore[override]
        return not self._severed and super()._requires_egress_control(**policies)

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        known = super().capabilities
        if self._severed:
            return known.model_copy(update={"disable_internet": True})
        return known

    @override
    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        if self._severed and network_policy.network_mode is NetworkMode.NO_NETWORK:
            return
        await super()._apply_network_policy(network_policy)

    @override
    def _write_env_compose_file(self) -> Path:
        path = super()._write_env_compose_file()
        if self._severed:
            compose = json.loads(path.read_text())
            compose["services"][MAIN_SERVICE_NAME]["network_mode"] = "none"
            path.write_text(json.dumps(compose, indent=2))
        return path

    @override
    async def start(self, force_build: bool) -> None:
        self._main = None
        await super().start(force_build)
        self.running = True

    @override
    async def stop(self, delete: bool) -> None:
        self.running = False
        await super().stop(delete)

    async def clear_for_verifier(self) -> None:
        """Empty the folders that the verifier is to have to itself; raises SandboxError.

        /tests is one of them unless the Dockerfile speaks of it, for an image may bring a part.
        """
        dockerfile = self.environment_dir / "Dockerfile"
        theirs = dockerfile.is_file() and TESTS in dockerfile.read_text(errors="replace")
        places = [VERIFIER_LOGS] if theirs else [VERIFIER_LOGS, TESTS]
        command = ["bash", "-c", CLEAR, "bash", *places]
        await self.engine("exec", "--user", "0", await self.main_container(), *command)

    async def main_container(self) -> str:
        """The id of the container that agent and verifier work in; raises SandboxError."""
        if self._main is None:
            project = f"label=com.docker.compose.project={self.session_id}"
            for container in (await self.engine("ps", "--quiet", "--filter", project)).split():
                (found,) = json.loads(await self.engine("inspect", container))
                if found["Config"]["Labels"].get(SERVICE) == MAIN_SERVICE_NAME:
                    self._main = container
        if self._main is None:
            raise SandboxError("the container is gone")
        return self._main

    async def engine(self, *arguments: str, check: bool = True) -> str:
        """What a call of the engine prints; raises SandboxError when it fails."""
        process = await asyncio.create_subprocess_exec(
            *self._engine_cmd(*arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            await end(process)
        if check and process.returncode != 0:
            said = " ".join(err.decode(errors="replace").split())[-300:]
            raise SandboxError(f"{arguments[0]} of the container engine failed: {said}")
        return out.decode(errors="replace")

    @override
    async def _run_docker_compose_command(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: OutputCallback | None = None,
    ) -> ExecResult:
        """As Harbor's, but a command in the main container is run by the engine itself: compose
        would read its files each time, which takes most of a second."""
        if command[0] == "down":
            return await self._down(command[1:])
        inner = _in_main(command)
        if command[0] == "cp" and not self.runtime().supports_compose_cp:
            raise RuntimeError("this compose has no cp")  # Harbor has another way then
        if inner is None or on_output is not None:
            done = await super()._run_docker_compose_command(
                command, False, timeout_sec, stdin_data, on_output
            )
            if check and done.return_code != 0:
                raise RuntimeError(f"compose {command[0]} failed: {_end_of(done)}")
            if command[0] == "build" and self.runtime().engine == ("podman",):
                await self._keep_layers()
            return done
        options, words = inner
        keep_open = [] if stdin_data is None else ["--interactive"]
        process = await asyncio.create_subprocess_exec(
            *self._engine_cmd("exec", *keep_open, *options, await self.main_container(), *words),
            stdin=asyncio.subprocess.DEVNULL if stdin_data is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        done = await self._collect_buffered_output(
            process, timeout_sec=timeout_sec, stdin_data=stdin_data
        )
        if done.return_code != 0:
            await self._check_engine(done, options)
        if check and done.return_code != 0:
            raise RuntimeError(f"{words[0]} in the container failed: {_end_of(done)}")
        return done

    async def _check_engine(self, done: ExecResult, options: list[str]) -> None:
        """Raise SandboxError when a command has failed because the engine could not run it."""
        told = "Error" in (done.stdout or "")[:200]  # by the engine, or by the command itself
        if not told and done.return_code not in ENGINE_FAILED:
            return
        main = await self.main_container()
        if (await self.engine("inspect", "--format", "{{.State.Running}}", main)).strip() != "true":
            raise SandboxGone("the container has ended")
        if NO_USER in (done.stdout or ""):
            await self.engine("exec", *options, main, "true")

    async def _down(self, options: list[str]) -> ExecResult:
        """End the containers, with the images that were built for them when they are to go.

        podman-compose would take each image named localhost/... for one of these.
        """
        built = "--rmi" in options and not self.runtime().supports_compose_cp
        if built:
            at = options.index("--rmi")
            options = options[:at] + options[at + 2 :]
        done = await super()._run_docker_compose_command(["down", "--timeout", GRACE_S, *options])
        if built and (own := await self._built_images()):
            await self.engine("image", "rm", *own)
        return done

    async def _built_images(self) -> list[str]:
        listed = await self.engine("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
        return [name for name in listed.split() if self.session_id in name]

    async def _keep_layers(self) -> None:
        """Give what was built a name that outlives the trial.

        podman removes the layers of an image with its last name, and would run each `RUN` again in
        the next trial of the task.
        """
        content = await asyncio.to_thread(lambda: self.environment_id)
        for name in await self._built_images():
            service = name.rpartition(self.session_id)[2].partition(":")[0]
            await self.engine("tag", name, f"{CACHE}:{content[:CACHE_DIGITS]}{service}")

    @staticmethod
    @override
    async def _collect_buffered_output(
        process: asyncio.subprocess.Process,
        *,
        timeout_sec: int | None,
        stdin_data: bytes | None = None,
    ) -> ExecResult:
        """The output of a call of the engine, its last bytes if it is long; one that is given up
        is ended with its children. Raises RuntimeError when the time is up, as Harbor's does.
        """
        try:
            async with asyncio.timeout(timeout_sec or None):
                feeding = asyncio.create_task(_feed(process, stdin_data))
                out = await _tail(process)
                await feeding
                code = await process.wait()
        except BaseException as error:
            await end(process)
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
            raise
        return ExecResult(stdout=out.decode(errors="replace") or None, return_code=code)


class Docker(ContainerEnvironment):
    """`--sandbox docker`."""


class Podman(ContainerEnvironment, PodmanEnvironment):
    """`--sandbox podman`."""


def _end_of(done: ExecResult) -> str:
    """The last words of a program that failed, and its exit status."""
    said = " ".join((done.stdout or "").split())[-350:]
    return f"exit status {done.return_code}: {said}"


def _in_main(command: list[str]) -> tuple[list[str], list[str]] | None:
    """The options and the words of a compose command that runs another in the main container."""
    if command[0] != "exec":
        return None
    at, options = 1, []
    while command[at].startswith("-"):
        taken = 2 if command[at] in ("-w", "-e", "-u") else 1
        if command[at] not in ("-T", "--no-TTY"):
            options += command[at : at + taken]
        at += taken
    return (options, command[at + 1 :]) if command[at] == MAIN_SERVICE_NAME else None


async def _feed(process: asyncio.subprocess.Process, data: bytes | None) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(data or b"")
            await process.stdin.drain()
        process.stdin.close()


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    """Read the output to its end; the last `OUTPUT_LIMIT` bytes."""
    assert process.stdout
    kept = bytearray()
    while chunk := await process.stdout.read(1 << 16):
        kept += chunk
        if len(kept) > 2 * OUTPUT_LIMIT:
            del kept[:-OUTPUT_LIMIT]
    return bytes(kept[-OUTPUT_LIMIT:])


async def end(process: asyncio.subprocess.Process) -> None:
    """End a program of ours that may still run, with its descendants."""
    if process.returncode is None:
        await end_client(process.pid)
        await process.wait()
