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
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, override

from harbor.constants import MAIN_SERVICE_NAME
from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.docker.docker import DockerEnvironment
from harbor.environments.podman import PodmanEnvironment
from harbor.models.task.config import NetworkMode, NetworkPolicy

from miles_core.agent_server.reaper.owner import Owner
from miles_core.agent_server.sandbox import processes
from miles_core.agent_server.sandbox.errors import SandboxError

COMPOSE = "docker-compose.yaml"
SERVICE = "com.docker.compose.service"
END_LIMIT_S = 5.0
"""How long a program on this host may take to end after it was asked to."""
GRACE = "1s"
"""Between SIGTERM and SIGKILL of a container: its first process is a sleep that heeds none."""

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
        compose = json.loads(path.read_text())
        main = compose["services"][MAIN_SERVICE_NAME]
        main["stop_grace_period"] = GRACE
        if self._severed:
            main["network_mode"] = "none"
        path.write_text(json.dumps(compose, indent=2))
        return path

    @override
    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        self.running = True

    @override
    async def stop(self, delete: bool) -> None:
        self.running = False
        await super().stop(delete)

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
            await end_tree(process)
        if check and process.returncode != 0:
            said = " ".join(err.decode(errors="replace").split())[-300:]
            raise SandboxError(f"{arguments[0]} of the container engine failed: {said}")
        return out.decode(errors="replace")

    @staticmethod
    @override
    async def _collect_buffered_output(
        process: asyncio.subprocess.Process,
        *,
        timeout_sec: int | None,
        stdin_data: bytes | None = None,
    ) -> ExecResult:
        """The output of a call of the engine; one that is given up is ended with its children.

        Raises RuntimeError when the time is up, as Harbor's does.
        """
        try:
            async with asyncio.timeout(timeout_sec or None):
                return await DockerEnvironment._collect_buffered_output(
                    process, timeout_sec=None, stdin_data=stdin_data
                )
        except BaseException as error:
            await end_tree(process)
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
            raise


class Docker(ContainerEnvironment):
    """`--sandbox docker`."""


class Podman(ContainerEnvironment, PodmanEnvironment):
    """`--sandbox podman`."""


async def end_tree(process: asyncio.subprocess.Process) -> None:
    """Ask a process and all that descends from it to end, and see to it."""
    if process.returncode is not None:
        return
    tree = [process.pid, *processes.descendants(process.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in tree:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if number is signal.SIGTERM:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(_gone(tree)), END_LIMIT_S)
    await process.wait()


async def _gone(tree: list[int]) -> None:
    while any(not processes.exiting(pid) for pid in tree):  # noqa: ASYNC110 (not our children)
        await asyncio.sleep(0.02)
