"""The sandbox as an environment of Harbor, loaded by its import path."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import TaskOS

from miles_core.agent_server.sandbox import accounts, transfer
from miles_core.agent_server.sandbox.box import Box, Completed
from miles_core.agent_server.sandbox.build import ImageState, Workplace
from miles_core.agent_server.sandbox.channel import KILLED
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxUnsupported
from miles_core.agent_server.sandbox.host import HOSTS, LOG_FOLDERS, VERIFIER_LOGS, Plan
from miles_core.agent_server.sandbox.images import Image

TESTS = "/tests"
TRANSFER_LIMIT_S = 120.0
KIND_LIMIT_S = 10.0


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
        workdir = self.task_env_config.workdir or self.image.workdir
        if image.state is not None or recipe.works() or workdir != self.image.workdir:
            await self._box.make_folder(workdir)
        self.image.workdir = workdir
        await self._upload_environment_dir_after_start()

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

    @staticmethod
    def _check(done: Completed, what: str) -> None:
        """Raise SandboxError for what was done in the sandbox and failed."""
        if done.code != 0:
            hint = "it was killed; is memory_mb of task.toml enough?"
            said = hint if done.code == KILLED else done.problem()
            raise SandboxError(f"{what} failed with {done.code}: {said}")

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
        order = {"is_folder": self.inside(path)}
        done = await self.box.files(order, user=account, timeout_s=KIND_LIMIT_S)
        return done.code == 0

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        source = Path(source_dir)
        if str(target_dir) in LOG_FOLDERS and not any(source.iterdir()):
            return  # the verifier finds these in any case
        archive = await asyncio.to_thread(transfer.pack, source)
        done = await self.box.files(
            {"unpack": str(target_dir)}, stdin=archive, timeout_s=TRANSFER_LIMIT_S
        )
        self._check(done, f"writing {target_dir}")

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        mode = "755" if os.access(source, os.X_OK) else "644"
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        argv = ["sh", "-c", script, "upload", str(target_path), mode]
        data = await asyncio.to_thread(source.read_bytes)
        done = await self.box.run(argv, stdin=data, timeout_s=TRANSFER_LIMIT_S)
        self._check(done, f"writing {target_path}")

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        order = {"pack": str(source_dir), "ends": transfer.ENDS, "limits": transfer.LIMITS}
        limit = transfer.TRANSFER_LIMIT + 1
        done = await self.box.files(order, timeout_s=TRANSFER_LIMIT_S, limit=limit)
        data = self._read(done, str(source_dir))
        await asyncio.to_thread(transfer.unpack, data, Path(target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        limit = transfer.TRANSFER_LIMIT + 1
        argv = ["head", "-c", str(limit), "--", str(source_path)]
        done = await self.box.run(argv, timeout_s=TRANSFER_LIMIT_S, limit=limit)
        data = self._read(done, str(source_path))
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)

    @staticmethod
    def _read(done: Completed, path: str) -> bytes:
        if done.code != 0:
            raise FileNotFoundError(done.problem())
        if len(done.out) > transfer.TRANSFER_LIMIT:
            raise SandboxError(f"{path}: more than {transfer.TRANSFER_LIMIT >> 20} MiB")
        return done.out

    def inside(self, path: str) -> str:
        """An absolute path in the sandbox, from one that may be relative to the workdir."""
        joined = str(PurePosixPath(self.image.workdir) / path)
        return joined + "/" if path.endswith("/") and not joined.endswith("/") else joined
