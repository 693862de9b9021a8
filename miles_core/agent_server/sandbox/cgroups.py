"""Memory, process and CPU limits through cgroups, v1 and v2, where they may be written.

The directories of one server lie under `miles-agent-<pid>-<start time>`. Those of a server that was
killed are told from those of one that is alive by the pid, or by a lock where that is of another
pid namespace, and are removed at start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.serving import process_start

ROOT = Path("/sys/fs/cgroup")
PREFIX = "miles-agent-"
RESIDENTS = "miles-agent.residents"
"""A cgroup for the processes of a v2 cgroup that is to have limited ones below it: the kernel lets
none have both (cgroup-v2.rst, "No Internal Process Constraint")."""
CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
MOVE_ROUNDS = 20
_MEMORY = (
    ("memory.current", "memory.max"),
    ("memory.usage_in_bytes", "memory.memsw.limit_in_bytes", "memory.limit_in_bytes"),
)
"""Files of a cgroup of version 2 and 1: what is used, and limits of it."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox; None leaves a resource alone."""

    memory_mb: int | None = None
    pids: int | None = None
    cpus: float | None = None


class CgroupTree:
    """The cgroups of this server: one directory for each controller (v1), or one in all (v2).

    `limits` tells for each controller what enforces it, as "cgroup v2", or "none" and why.
    """

    def __init__(self, root: Path = ROOT) -> None:
        pid = os.getpid()
        self._name = f"{PREFIX}{pid}-{process_start(pid)}"
        self._parents: dict[Path, dict[str, str]] = {}
        """The directory of the sandboxes, with the version of each controller there."""
        self._locks: list[int] = []
        self.limits: dict[str, str] = {}
        if (root / "cgroup.controllers").exists():
            self._open_v2(_v2_parent(root))
        else:
            self._open_v1(root)

    def _open_v1(self, root: Path) -> None:
        for controller in CONTROLLERS:
            try:
                self._open(root / controller, {controller: "v1"})
            except OSError as error:
                self.limits[controller] = f"none ({error.strerror} in {root / controller})"

    def _open_v2(self, parent: Path) -> None:
        try:
            available = (parent / "cgroup.controllers").read_text().split()
            wanted = [name for name in CONTROLLERS if name in available]
            self.limits = dict.fromkeys(CONTROLLERS, f"none (not available in {parent})")
            if wanted:
                _distribute(parent, wanted)
                directory = self._open(parent, dict.fromkeys(wanted, "v2"))
                _enable(directory, wanted)
        except OSError as error:
            self._parents.clear()
            reason = f"none ({error.strerror} in {parent})"
            self.limits = dict.fromkeys(CONTROLLERS, reason)

    def _open(self, parent: Path, controllers: dict[str, str]) -> Path:
        sweep(parent)
        directory = parent / self._name
        directory.mkdir(exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._locks.append(lock)
        self._parents[directory] = controllers
        self.limits.update({name: f"cgroup {version}" for name, version in controllers.items()})
        return directory

    def make(self, name: str, limits: Limits) -> list[Path]:
        """Make the cgroups of one sandbox and write its limits; the directories to join.

        Raises SandboxError, and leaves nothing then.
        """
        made: list[Path] = []
        try:
            for parent, controllers in self._parents.items():
                directory = parent / name
                directory.mkdir()
                made.append(directory)
                for controller, version in controllers.items():
                    _limit(directory, controller, version, limits)
        except OSError as error:
            for directory in made:
                directory.rmdir()
            raise SandboxError(f"no limits for the sandbox: {error}") from error
        return made

    @property
    def directories(self) -> list[Path]:
        """Where the cgroups of this server's sandboxes are."""
        return list(self._parents)

    def close(self) -> None:
        """Remove the server's own directories."""
        for directory in self._parents:
            remove(directory)
        while self._locks:
            os.close(self._locks.pop())


def make_room(directories: list[Path], memory_mb: int) -> None:
    """Let a sandbox use `memory_mb` more than it does now, if that is more than its limit is.

    What it has written to its disk is memory as well, and ends with the sandbox alone.
    """
    for directory in directories:
        for names in _MEMORY:
            used, *limits = (directory / name for name in names)
            if used.exists():
                wanted = int(used.read_text()) + (memory_mb << 20)
                for limit in limits:  # that with swap space first: it is never the lower one
                    if limit.exists() and _number(limit) < wanted:
                        limit.write_text(str(wanted))


def _number(limit: Path) -> float:
    text = limit.read_text().strip()
    return math.inf if text == "max" else int(text)


def _limit(directory: Path, controller: str, version: str, limits: Limits) -> None:
    """Write what `limits` says of a controller. Raises OSError."""
    if controller == "memory" and limits.memory_mb:
        size = str(limits.memory_mb << 20)
        if version == "v1":
            (directory / "memory.limit_in_bytes").write_text(size)
            _write_where_there(directory / "memory.memsw.limit_in_bytes", size)
        else:
            (directory / "memory.max").write_text(size)
            _write_where_there(directory / "memory.swap.max", "0")
    elif controller == "pids" and limits.pids:
        (directory / "pids.max").write_text(str(limits.pids))
    elif controller == "cpu" and limits.cpus:
        quota = int(limits.cpus * CPU_PERIOD_US)
        if version == "v1":
            (directory / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (directory / "cpu.max").write_text(f"{quota} {CPU_PERIOD_US}")


def _write_where_there(path: Path, text: str) -> None:
    """Write a limit of swap space, which not every kernel counts."""
    if path.exists():
        path.write_text(text)


def _enable(directory: Path, controllers: Iterable[str]) -> None:
    """Give controllers to the cgroups below a v2 directory. Raises OSError."""
    file = directory / "cgroup.subtree_control"
    missing = set(controllers) - set(file.read_text().split())
    if missing:
        file.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _distribute(directory: Path, controllers: list[str]) -> None:
    """Enable controllers below the v2 cgroup of this process. Raises OSError.

    Outside of the root, its processes must move into a cgroup of their own first.
    """
    for _ in range(MOVE_ROUNDS):
        try:
            _enable(directory, controllers)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or 0 in members(directory):  # 0: of another namespace
                raise
        residents = directory / RESIDENTS
        residents.mkdir(exist_ok=True)
        for pid in members(directory):
            with contextlib.suppress(ProcessLookupError):
                (residents / "cgroup.procs").write_text(str(pid))
    _enable(directory, controllers)


def abandoned(root: Path = ROOT) -> list[Path]:
    """The directories that servers which are gone have left where one of this process would be."""
    unified = (root / "cgroup.controllers").exists()
    parents = [_v2_parent(root)] if unified else [root / name for name in CONTROLLERS]
    return [
        directory
        for parent in parents
        for directory in parent.glob(f"{PREFIX}*-*")
        if _is_abandoned(directory)
    ]


def _v2_parent(root: Path) -> Path:
    """The v2 cgroup of this process, or the one above it where that is for processes alone."""
    own = root / _own_v2_path()
    return own.parent if own.name == RESIDENTS else own


def _own_v2_path() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:].lstrip("/")
    return ""


def members(directory: Path) -> list[int]:
    """The processes in a cgroup; 0 stands for one that this pid namespace does not have."""
    try:
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def memory_kills(directories: list[Path]) -> int:
    """How many processes of a sandbox were ended for a lack of memory, where its cgroups tell."""
    for directory in directories:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                fields = (line.split() for line in (directory / name).read_text().splitlines())
                return sum(int(value) for key, value in fields if key == "oom_kill")
    return 0


def memory_peak(directories: list[Path]) -> int | None:
    """Most bytes of memory that were used at once in a sandbox's cgroups, where they tell."""
    for directory in directories:
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with contextlib.suppress(FileNotFoundError):
                return int((directory / name).read_text())
    return None


def remove(directory: Path, wait_s: float = 2.0) -> bool:
    """Remove a cgroup and those below it; busy ones are tried again for `wait_s` seconds."""
    if not directory.exists():
        return True
    for child in [entry for entry in directory.iterdir() if entry.is_dir()]:
        remove(child, wait_s)
    end = time.monotonic() + wait_s
    while True:
        try:
            directory.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(0.002)


def sweep(parent: Path) -> None:
    """End what servers that are gone left in their cgroups, and remove the directories."""
    for directory in parent.glob(f"{PREFIX}*-*"):
        if _is_abandoned(directory):
            end(directory)


def end(directory: Path) -> bool:
    """End the processes of a cgroup and of those in it, and remove them; whether they are gone."""
    for child in [directory, *directory.iterdir()]:
        for member in members(child) if child.is_dir() else []:
            if member:  # 0 would be this process and its group (kill(2))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
    return remove(directory)


def _is_abandoned(directory: Path) -> bool:
    """Whether the server of a directory is gone."""
    pid, _, start = directory.name.removeprefix(PREFIX).partition("-")
    if pid.isdigit() and process_start(int(pid)) == start:
        return False
    try:
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(held)
    return True
