"""The sandbox as an environment of Harbor, loaded by its import path."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.models.task.config import TaskOS
from harbor.models.trial.config import ResourceMode

from miles_core.agent_server.protocol import Phase
from miles_core.agent_server.sandbox import accounts
from miles_core.agent_server.sandbox.box import Box, BoxSettings, Completed
from miles_core.agent_server.sandbox.build import ImageState, Workplace
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxUnsupported
from miles_core.agent_server.sandbox.forks import Helpers
from miles_core.agent_server.sandbox.images import Image, Images, Recipe
from miles_core.agent_server.sandbox.layers import Root

DEFAULT_MEMORY_MB = 4096
DEFAULT_DISK_MB = 2048
PIDS = 512
KILLED = (-9, 137)
NAMES_LIMIT = 20
VERIFIER_LOGS = "/logs/verifier"
TESTS = "/tests"
LOG_DIRECTORIES = ("/logs", "/logs/agent", VERIFIER_LOGS, "/logs/artifacts")
RESTORE_LOGS = """for place in "$@"; do
  if [ -L "$place" ] || [ ! -d "$place" ]; then
    rm -f -- "$place" && mkdir -- "$place" && chmod 777 -- "$place"
  fi
done"""
PACK = """f="$1/test-stdout.txt"
if [ -f "$f" ] && [ ! -L "$f" ] && [ "$(stat -c %s "$f")" -gt "$2" ]; then
  tail -c "$2" "$f" > "$f.end" && mv -f "$f.end" "$f"
fi
exec tar cf - -C "$1" ."""
"""Packs a directory; of what a verifier printed, the last bytes."""
OUTPUT_LIMIT = 8 << 20
TRANSFER_LIMIT = 256 << 20
"""Bytes of one file or directory that is read out of a sandbox."""


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
        memory = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        recipe = Recipe(self.environment_dir, self.task_env_config.docker_image)
        image = self._image = await self._host.images.take(recipe, self._host.build_box)
        settings = BoxSettings(
            root=image.root,
            disk_mb=self.task_env_config.storage_mb or DEFAULT_DISK_MB,
            limits=Limits(
                memory_mb=int(memory or DEFAULT_MEMORY_MB),
                pids=PIDS,
                cpus=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
            ),
            binds=self._host.binds,
            relays=self._host.relays,
            on_name=self._host.looked_up,
        )
        name = f"{self._host.trial_id}-{self._host.next_index()}"
        self._box = Box(name, settings, self._host.tree, self._host.helpers)
        await self._box.start()
        if image.state is None:
            place = Workplace(self._box, lambda: self.lookups)
            self.image = await self._host.images.follow(recipe, place, self._host.build_box)
        else:
            self.image = image.state
        self.image.workdir = self.task_env_config.workdir or self.image.workdir
        await self.checked(["mkdir", "-p", self.image.workdir])
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

    async def checked(self, argv: list[str], stdin: bytes | None = None) -> None:
        """Run a program as root that must succeed; raises SandboxError."""
        done = await self.box.run(argv, stdin=stdin, timeout_s=120)
        if done.code != 0:
            message = done.err.decode(errors="replace").strip()[-300:]
            if done.code in KILLED:
                message = "it was killed; is memory_mb of task.toml enough?"
            raise SandboxError(f"{argv[0]} in the sandbox failed with {done.code}: {message}")

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

    # Files pass through programs inside the sandbox, always: a path that is resolved on the
    # host could lead through a link of the agent's to a file of the host.

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        archive = await asyncio.to_thread(_pack, Path(source_dir))
        script = 'mkdir -p "$1" && exec tar xf - -C "$1" --no-same-owner'
        await self.checked(["sh", "-c", script, "upload", str(target_dir)], archive)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        mode = "755" if os.access(source, os.X_OK) else "644"
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        argv = ["sh", "-c", script, "upload", str(target_path), mode]
        await self.checked(argv, await asyncio.to_thread(source.read_bytes))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        data = await self._fetch(["sh", "-c", PACK, "pack", str(source_dir), str(OUTPUT_LIMIT)])
        await asyncio.to_thread(_unpack, data, Path(target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._fetch(["cat", "--", str(source_path)])
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)

    async def _fetch(self, argv: list[str]) -> bytes:
        done = await self.box.run(argv, timeout_s=120, limit=TRANSFER_LIMIT + 1)
        if done.code != 0:
            raise FileNotFoundError(done.err.decode(errors="replace").strip()[-300:])
        if len(done.out) > TRANSFER_LIMIT:
            raise SandboxError(f"{shlex.join(argv)}: more than {TRANSFER_LIMIT >> 20} MiB")
        return done.out

    def inside(self, path: str) -> str:
        """An absolute path in the sandbox, from one that may be relative to the workdir."""
        joined = str(PurePosixPath(self.image.workdir) / path)
        return joined + "/" if path.endswith("/") and not joined.endswith("/") else joined


class SandboxHost:
    """What one trial's sandboxes are made from on this host."""

    def __init__(
        self,
        trial_id: str,
        images: Images,
        tree: CgroupTree,
        binds: list[tuple[str, str]],
        relays: list[tuple[int, str, int]],
        helpers: Helpers,
    ) -> None:
        self.trial_id = trial_id
        self.images = images
        self.tree = tree
        self.binds = binds
        self.relays = relays
        self.helpers = helpers
        self.environments: list[BubblewrapEnvironment] = []
        self.phase = Phase.ENVIRONMENT
        self.names: dict[Phase, list[str]] = {}
        """The public names that were looked up in each phase, in vain."""
        self._started = 0

    async def build_box(self, name: str, root: Root, told: Callable[[str, bool], None]) -> Box:
        """Start a sandbox in which an image is built; it has nothing of this trial."""
        limits = Limits(memory_mb=DEFAULT_MEMORY_MB, pids=PIDS, cpus=None)
        settings = BoxSettings(root, DEFAULT_DISK_MB, limits, on_name=told)
        box = Box(f"images.{name}", settings, self.tree, self.helpers)
        try:
            await box.start()
        except BaseException:
            await box.close()
            raise
        return box

    def opened(self, environment: BubblewrapEnvironment) -> None:
        self.environments.append(environment)

    def looked_up(self, name: str, by_command: bool) -> None:
        """Note a name; in the verifier's phase what the agent left running does not count."""
        if self.phase is Phase.VERIFIER and not by_command:
            return
        names = self.names.setdefault(self.phase, [])
        if name not in names and len(names) < NAMES_LIMIT:
            names.append(name)

    async def enter(self, phase: Phase) -> None:
        """Begin a phase; the verifier finds its log directories whatever the agent did to them.

        What the verifier writes is out of the reach of what the agent left running.
        """
        self.phase = phase
        for environment in self.environments:
            if not environment.running:
                continue
            environment.box.rejoin()
            if phase is Phase.VERIFIER:
                await environment.checked(["sh", "-c", RESTORE_LOGS, "sh", *LOG_DIRECTORIES])
                await environment.box.seclude(environment.verifier_places())

    def space(self) -> dict[str, int | None]:
        """Bytes that the sandboxes of the trial used, all together; None where nothing tells."""
        boxes = [e.box for e in self.environments if e.started]
        disk = [box.disk_used for box in boxes if box.disk_used is not None]
        memory = [box.memory_peak for box in boxes if box.memory_peak is not None]
        return {
            "disk_bytes": sum(disk) if disk else None,
            "memory_peak_bytes": max(memory) if memory else None,
        }

    def next_index(self) -> int:
        """A number for each sandbox of the trial: a separate verifier has one of its own."""
        self._started += 1
        return self._started

    async def close(self) -> None:
        """End every sandbox of the trial, by its own handle."""
        for environment in self.environments:
            environment.kill()
            await environment.stop(delete=True)


HOSTS: dict[str, SandboxHost] = {}
"""The trials of this process that are running in this kind of sandbox."""


def _pack(source: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(source, arcname=".")
    return buffer.getvalue()


def _unpack(data: bytes, target: Path) -> None:
    """Unpack what a sandbox packed: no devices, nothing outside of `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".incoming-") as incoming:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if member.issym() or member.islnk():
                    continue
                archive.extract(member, incoming, filter=transfer_tar_filter)
        _merge(Path(incoming), target)


def _merge(source: Path, target: Path) -> None:
    for path in list(source.iterdir()):
        place = target / path.name
        if path.is_dir() and place.is_dir() and not place.is_symlink():
            _merge(path, place)
        else:
            if place.is_dir() and not place.is_symlink():
                raise SandboxError(f"{place.name} is a directory here and a file in the sandbox")
            os.replace(path, place)
