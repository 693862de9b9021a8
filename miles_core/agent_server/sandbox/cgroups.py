"""Memory, process and CPU limits through cgroups, v1 and v2, where they may be written.

The directories of one server lie under `miles-agent-<pid>-<start time>`, so that those of a
server that was killed can be told from those of one that is alive, and are removed at start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from miles_core.serving import process_start

ROOT = Path("/sys/fs/cgroup")
PREFIX = "miles-agent-"
CPU_PERIOD_US = 100_000


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox; None leaves a resource alone."""

    memory_mb: int | None = None
    pids: int | None = None
    cpus: float | None = None


class CgroupTree:
    """The cgroups of this server: one directory for each controller (v1), or one in all (v2)."""

    def __init__(self, root: Path = ROOT) -> None:
        pid = os.getpid()
        self._name = f"{PREFIX}{pid}-{process_start(pid)}"
        self._parents: dict[str, Path] = {}
        self.limits: dict[str, str] = {}
        unified = root / "cgroup.controllers"
        if unified.exists():
            self._open_v2(root / _own_v2_path())
        else:
            self._open_v1(root)

    def _open_v1(self, root: Path) -> None:
        for controller in ("memory", "pids", "cpu"):
            directory = root / controller / self._name
            try:
                sweep(root / controller)
                directory.mkdir(exist_ok=True)
            except OSError as error:
                self.limits[controller] = f"none ({error.strerror} in {root / controller})"
                continue
            self._parents[controller] = directory
            self.limits[controller] = "cgroup v1"

    def _open_v2(self, parent: Path) -> None:
        try:
            sweep(parent)
            available = (parent / "cgroup.controllers").read_text().split()
            wanted = [name for name in ("memory", "pids", "cpu") if name in available]
            switch = " ".join(f"+{name}" for name in wanted)
            (parent / "cgroup.subtree_control").write_text(switch)
            directory = parent / self._name
            directory.mkdir(exist_ok=True)
            (directory / "cgroup.subtree_control").write_text(switch)
        except OSError as error:
            for name in ("memory", "pids", "cpu"):
                self.limits[name] = f"none ({error.strerror} in {parent})"
            return
        self._parents["v2"] = directory
        for name in ("memory", "pids", "cpu"):
            self.limits[name] = "cgroup v2" if name in wanted else "none (no such controller)"

    def make(self, name: str, limits: Limits) -> list[Path]:
        """Make the cgroups of one sandbox and write its limits; the directories to join."""
        made = []
        for controller, parent in self._parents.items():
            directory = parent / name
            directory.mkdir()
            made.append(directory)
            for file, value in _settings(controller, limits).items():
                (directory / file).write_text(value)
        return made

    def close(self) -> None:
        """Remove the server's own directories."""
        for directory in self._parents.values():
            remove(directory)


def _settings(controller: str, limits: Limits) -> dict[str, str]:
    """Which file gets which value."""
    memory = str(limits.memory_mb << 20) if limits.memory_mb else None
    pids = str(limits.pids) if limits.pids else None
    quota = str(int(limits.cpus * CPU_PERIOD_US)) if limits.cpus else None
    wanted: dict[str, str | None] = {}
    if controller == "memory":
        wanted["memory.limit_in_bytes"] = memory
    elif controller == "pids":
        wanted["pids.max"] = pids
    elif controller == "cpu":
        wanted["cpu.cfs_quota_us"] = quota
    else:
        wanted = {
            "memory.max": memory,
            "pids.max": pids,
            "cpu.max": f"{quota} {CPU_PERIOD_US}" if quota else None,
        }
    return {file: value for file, value in wanted.items() if value is not None}


def _own_v2_path() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:].lstrip("/")
    return ""


def members(directory: Path) -> list[int]:
    """The processes in a cgroup."""
    try:
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


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
            time.sleep(0.02)


def sweep(parent: Path) -> None:
    """End what servers that are gone left in their cgroups, and remove the directories."""
    for directory in parent.glob(f"{PREFIX}*-*"):
        pid, _, start = directory.name.removeprefix(PREFIX).partition("-")
        if pid.isdigit() and process_start(int(pid)) == start:
            continue
        for child in [directory, *directory.iterdir()]:
            if child.is_dir():
                for member in members(child):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
        remove(directory)
