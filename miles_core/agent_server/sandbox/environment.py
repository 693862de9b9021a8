"""The sandbox as an environment of Harbor, loaded by its import path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import TaskOS

from miles_core.agent_server.sandbox import accounts, entrypoint, exchange
from miles_core.agent_server.sandbox.box import Box, Completed
from miles_core.agent_server.sandbox.build import ImageState, Workplace
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxUnsupported
from miles_core.agent_server.sandbox.host import HOSTS, LOG_FOLDERS, VERIFIER_LOGS, Plan
from miles_core.agent_server.sandbox.images import Image

TESTS = "/tests"
PRELOAD = "/etc/ld.so.preload"
"""Libraries that are loaded into every program (ld.so(8))."""


class BubblewrapEnvironment(BaseEnvironment):
    """A Harbor environment of Linux namespaces.

    `HOSTS[trial_id]` holds what this server knows and Harbor does not: the base directory, the
    cgroups, the read-only binds and the relays. Harbor writes arguments into the trial's files,
    so only the id is one.
    """

    def __init__(self, *args: Any, trial_id: str, **kwargs: Any) -> None:
        self._host = HOSTS[trial_id]
        self._box: Box | None = None
        self.image = ImageState()
        self._image: Image | None = None
        self.own_files: dict[str, str] = {}
        """What a verifier finds in files whatever the agent wrote; empty for one that is not."""
        super().__init__(*args, **kwargs)
        self._host.opened(self)

    @staticmethod
    @override
    def type() -> str:
        return "bubblewrap"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(
            cpu_limit=True, memory_limit=True, fractional_cpus=True
        )

    @override
    def _validate_definition(self) -> None:
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (self.environment_dir / name).exists():
                raise SandboxUnsupported(f"environment/{name}: services need --sandbox docker")
        if self.task_env_config.os is not TaskOS.LINUX:
            raise SandboxUnsupported(f"task.toml: os {self.task_env_config.os.value!r}")

    @override
    async def _apply_network_policy(self, network_policy: Any) -> None:
        """Whatever the policy allows, a sandbox has its relays and nothing else."""

    @property
    def box(self) -> Box:
        if self._box is None:
            raise SandboxError("the sandbox has not been started")
        return self._box

    @override
    async def start(self, force_build: bool) -> None:
        plan = Plan.of(self.environment_dir, self.task_env_config)
        made = await self._host.make(plan)
        recipe, image, self._box = made.recipe, made.image, made.box
        self._image = image
        if image.state is None:
            place = Workplace(self._box, lambda: self.lookups)
            self.image = await self._host.images.follow(recipe, place, self._host.build_box)
        else:
            self.image = image.state
        started_in = self.image.workdir
        workdir = self.task_env_config.workdir or started_in
        if image.state is not None or recipe.works() or workdir != self.image.workdir:
            await exchange.make_folder(self._box, workdir)
        self.image.workdir = workdir
        if entrypoint.is_run(self.image.entrypoint):
            await self._start_entrypoint(started_in)
        await self._upload_environment_dir_after_start()
        self.own_files = {PRELOAD: self._box.text_of(PRELOAD)}

    async def _start_entrypoint(self, workdir: str) -> None:
        account = await self._account(self.image.user)
        env = {"HOME": account.home, **self.image.env}
        await entrypoint.start(self.box, self.image.entrypoint, env, workdir, account)

    @property
    def lookups(self) -> list[str]:
        """The public names that were looked up since this phase of the trial began."""
        return self._host.names.get(self._host.phase, [])

    @property
    def started(self) -> bool:
        return self._box is not None

    @property
    def running(self) -> bool:
        return self._box is not None and self._box.alive

    @override
    async def stop(self, delete: bool) -> None:
        if self._box is not None:
            await self._box.close()
        if self._image is not None:
            self._host.images.release(self._image)
            self._image = None

    def verifier_places(self) -> dict[str, int]:
        """The folders that a verifier has to itself, with their modes.

        /tests is one of them unless the Dockerfile speaks of it, for an image may bring a part.
        """
        dockerfile = self.environment_dir / "Dockerfile"
        theirs = dockerfile.is_file() and TESTS in dockerfile.read_text(errors="replace")
        return {VERIFIER_LOGS: 0o777} if theirs else {VERIFIER_LOGS: 0o777, TESTS: 0o755}

    def kill(self) -> None:
        """End every process of the sandbox without asking any of them."""
        if self._box is not None:
            self._box.kill()

    async def run(
        self,
        argv: list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | int | None = None,
        **options: Any,
    ) -> Completed:
        """Run a program with the environment of the image and the task."""
        account = await self._account(self._resolve_user(user))
        return await self.box.run(
            argv,
            cwd=cwd or self.image.workdir,
            env={"HOME": account.home, **self.image.env, **(self._merge_env(env) or {})},
            user=account,
            **options,
        )

    async def run_agent(self, job: dict[str, Any], on_line: Callable[[bytes], None]) -> Completed:
        """Run the agent that this host has loaded, as the user of the phase."""
        account = await self._account(self._resolve_user(None))
        return await self.box.run_agent(
            job,
            env={"HOME": account.home, **self.image.env, **(self._merge_env(None) or {})},
            cwd=self.image.workdir,
            user=account,
            on_line=on_line,
        )

    async def _account(self, user: str | int | None) -> accounts.Account:
        user = self.image.user if user is None else user
        if user is None or accounts.is_root(user):
            return accounts.ROOT
        listed = await self.box.run(accounts.READ, timeout_s=30)
        return accounts.find(user, listed.out.decode(errors="replace"))

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done = await self.run(
            ["bash", "-c", command], cwd=cwd, env=env, user=user, timeout_s=timeout_sec
        )
        return ExecResult(
            stdout=done.out.decode(errors="replace"),
            stderr=done.err.decode(errors="replace"),
            return_code=done.code,
        )

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        account = await self._account(self._resolve_user(user))
        return await exchange.is_folder(self.box, self.inside(path), account)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        source = Path(source_dir)
        if str(target_dir) in LOG_FOLDERS and not any(source.iterdir()):
            return  # the verifier finds these in any case
        await exchange.put_folder(self.box, source, str(target_dir))

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await exchange.put_file(self.box, Path(source_path), str(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await exchange.get_folder(self.box, str(source_dir), Path(target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await exchange.get_file(self.box, str(source_path), Path(target_path))

    def inside(self, path: str) -> str:
        """An absolute path in the sandbox, from one that may be relative to the workdir."""
        joined = str(PurePosixPath(self.image.workdir) / path)
        return joined + "/" if path.endswith("/") and not joined.endswith("/") else joined
