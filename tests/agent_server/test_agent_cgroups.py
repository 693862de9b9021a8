"""Limits through cgroups, of whichever version this host has: real ones, with real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.agent_server.sandbox import cgroups
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits
from miles_core.agent_server.sandbox.errors import SandboxError

UNIFIED = (cgroups.ROOT / "cgroup.controllers").exists()
JOIN = 'for place in "$@"; do echo $$ > "$place/cgroup.procs"; done; '


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    made = CgroupTree()
    if not all(text.startswith("cgroup") for text in made.limits.values()):
        made.close()
        pytest.skip(f"this host lets nobody write cgroups: {made.limits}")
    yield made
    made.close()


def run_in(places: list[Path], script: str) -> subprocess.Popen[str]:
    """A shell that joins cgroups and goes on with a script."""
    command = ["bash", "-c", JOIN + script, "bash", *map(str, places)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _has_cpu(place: Path) -> bool:
    return (place / "cpu.max").exists() or (place / "cpu.cfs_quota_us").exists()


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=120)[0]


def test_memory_processes_and_cpu_are_limited(tree: CgroupTree) -> None:
    places = tree.make("limited", Limits(memory_mb=64, pids=20, cpus=0.25))
    many = "for i in $(seq 40); do sleep 2 & done; wait"
    python = f"{sys.executable} -c"
    eat = f"{python} 'print(len(bytearray(200 << 20)))'; echo code $?"
    work = "end=$((SECONDS + 2)); while [ $SECONDS -lt $end ]; do :; done; echo done"
    assert "code 137" in said(run_in(places, eat))
    peak = cgroups.memory_peak(places)
    assert peak is None or 32 << 20 < peak <= 64 << 20
    assert "fork" in said(run_in(places, many))
    assert "done" in said(run_in(places, work))
    counts = [(place / "cpu.stat").read_text().split() for place in places if _has_cpu(place)]
    (count,) = (dict(zip(words[::2], words[1::2], strict=True)) for words in counts)
    assert int(count["nr_throttled"]) > 0, count
    for place in places:
        assert cgroups.members(place) == []
        assert cgroups.remove(place) and not place.exists()


def test_room_is_made_above_what_is_used(tree: CgroupTree) -> None:
    """What lies in a memory file system is used and stays; a limit is never lowered."""
    places = tree.make("room", Limits(memory_mb=64))
    eat = f"{sys.executable} -c 'print(len(bytearray(40 << 20)))'; echo code $?"
    fill = "head -c 45M /dev/zero > /dev/shm/test-of-room; "
    try:
        assert "code 137" in said(run_in(places, fill + eat))
        cgroups.make_room(places, 64)
        assert "code 0" in said(run_in(places, eat))
        cgroups.make_room(places, 1)
        assert "code 0" in said(run_in(places, eat))
    finally:
        Path("/dev/shm/test-of-room").unlink()
        assert all(cgroups.remove(place) for place in places)
    free = tree.make("free", Limits())
    cgroups.make_room(free, 64)
    assert "code 0" in said(
        run_in(free, f"{sys.executable} -c 'bytearray(90 << 20)'; echo code $?")
    )
    assert all(cgroups.remove(place) for place in free)


def test_a_sandbox_without_limits_has_none(tree: CgroupTree) -> None:
    places = tree.make("free", Limits())
    assert said(run_in(places, "cat /proc/self/cgroup")).count("/free") == len(places)
    values = [
        (place / file).read_text().split()[0]
        for place in places
        for file in ("memory.max", "pids.max", "cpu.max", "cpu.cfs_quota_us")
        if (place / file).exists()
    ]
    assert len(values) >= 2 and set(values) <= {"max", "-1"}


def test_a_name_that_is_taken_leaves_nothing_half_made(tree: CgroupTree) -> None:
    places = tree.make("twice", Limits(pids=5))
    with pytest.raises(SandboxError, match="no limits"):
        tree.make("twice", Limits(pids=5))
    assert all(cgroups.remove(place) for place in places)
    with pytest.raises(SandboxError, match="no limits"):
        tree.make("odd", Limits(pids=-5))
    assert not [place for place in places if (place.parent / "odd").exists()]


def test_busy_cgroups_are_waited_for(tree: CgroupTree) -> None:
    (place, *_) = places = tree.make("busy", Limits())
    process = run_in(places, "echo here; exec sleep 60")
    try:
        assert process.stdout and process.stdout.readline() == "here\n"
        assert cgroups.members(place) == [process.pid]
        assert not cgroups.remove(place, 0.1) and place.exists()
    finally:
        process.kill()
        process.communicate()
    assert all(cgroups.remove(each) for each in places)


def server(script: str) -> subprocess.Popen[str]:
    """Another process with a tree of its own, which prints its directories."""
    code = (
        "import sys, time\n"
        "from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits\n"
        "tree = CgroupTree()\n"
        "print(*tree.make('one', Limits(pids=9)), flush=True)\n"
        f"{script}\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def sweep(places: list[Path]) -> None:
    """What a server does at its start."""
    for place in places:
        cgroups.sweep(place.parent.parent)


def test_a_dead_servers_cgroups_are_swept_and_a_living_ones_are_not(tree: CgroupTree) -> None:
    first = server("time.sleep(600)")
    assert first.stdout is not None
    places = [Path(word) for word in first.stdout.readline().split()]
    left = run_in(places, "echo here; exec sleep 600")
    assert left.stdout is not None and left.stdout.readline() == "here\n"
    try:
        sweep(places)
        assert all(place.exists() for place in places) and left.poll() is None
        first.kill()
        first.wait()
        sweep(places)
        assert left.wait(20) == -9
        assert not [place for place in places if place.parent.exists()]
    finally:
        for process in (first, left):
            process.kill()
            process.communicate()


@pytest.fixture
def parent(tree: CgroupTree) -> Iterator[Path]:
    """A cgroup that no other server of this machine sweeps."""
    (own,) = tree.make("apart", Limits())[:1]
    yield own
    cgroups.remove(own)


def test_a_living_server_of_another_pid_namespace_is_left_alone(parent: Path) -> None:
    """Its pid says nothing here, and nothing here could be told from its processes there."""
    other = parent / f"{cgroups.PREFIX}4194305-1"  # above the highest pid
    other.mkdir()
    lock = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    cgroups.sweep(parent)
    assert other.exists()
    os.close(lock)
    cgroups.sweep(parent)
    assert not other.exists()


def test_processes_of_another_pid_namespace_cost_no_life_here(parent: Path) -> None:
    """Version 2 tells pid 0 of what a namespace does not see, and that is oneself to kill(2)."""
    other = parent / f"{cgroups.PREFIX}4194305-2"
    other.mkdir()
    inside = run_in([other], "echo here; exec sleep 600")
    assert inside.stdout is not None and inside.stdout.readline() == "here\n"
    sweeping = (
        "from pathlib import Path\n"
        "from miles_core.agent_server.sandbox import cgroups\n"
        f"directory = Path({str(other)!r})\n"
        f"assert cgroups.members(directory) == {[0] if UNIFIED else []}\n"
        "cgroups.sweep(directory.parent)\n"
        "print('alive')\n"
    )
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    try:
        done = subprocess.run([*apart, sweeping], capture_output=True, text=True, timeout=60)
        assert done.stdout == "alive\n", done.stderr
        assert inside.poll() is None and other.exists()
    finally:
        inside.kill()
        inside.communicate()
        cgroups.remove(other)


def test_where_nothing_can_be_written_there_are_no_limits_and_a_reason(tmp_path: Path) -> None:
    for root in (tmp_path / "none", tmp_path / "unified"):
        root.mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("cpu memory pids\n")
    for root in (tmp_path / "none", tmp_path / "unified"):
        made = CgroupTree(root)
        assert set(made.limits) == {"memory", "pids", "cpu"}
        assert all(text.startswith("none (") for text in made.limits.values()), made.limits
        assert made.make("box", Limits(memory_mb=64, pids=5, cpus=1.0)) == []
        made.close()


NESTED = """
import subprocess, sys
from pathlib import Path
from miles_core.agent_server.sandbox import cgroups
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits
tree = CgroupTree()
places = tree.make("one", Limits(memory_mb=64, pids=5, cpus=0.5))
own = Path("/proc/self/cgroup").read_text()
print(tree.limits, [str(place) for place in places], own, flush=True)
if len(sys.argv) == 1:  # a second server that is started from here
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "second"], check=True)
for place in places:
    print({file: (place / file).read_text().strip()
        for file in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
        if (place / file).exists()})
    cgroups.remove(place)
tree.close()
"""


@pytest.mark.skipif(not UNIFIED, reason="needs a host with cgroup v2 alone")
class TestUnified:
    """What only version 2 has: one hierarchy, and no processes beside limited cgroups."""

    @pytest.fixture
    def service(self) -> Iterator[Path]:
        """A cgroup as a service or a container has, with a parent that has no processes."""
        outer = cgroups.ROOT / "atest.slice"
        own = outer / "own.service"
        own.mkdir(parents=True)
        for place in (cgroups.ROOT, outer):
            (place / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        yield own
        for place in (own, outer):
            for _ in range(50):
                with contextlib.suppress(OSError):
                    cgroups.remove(place, 0.1)
                if not place.exists():
                    break
        assert not outer.exists()

    def test_in_a_cgroup_of_its_own(self, service: Path) -> None:
        """The server and its neighbours move aside; a second one finds it done."""
        neighbour = run_in([service], "echo here; exec sleep 600")
        assert neighbour.stdout and neighbour.stdout.readline() == "here\n"
        try:
            out = said(run_in([service], f"exec {sys.executable} -c '{NESTED}'"))
            assert out.count("'memory': 'cgroup v2'") == 2, out
            assert f"{service.name}/{cgroups.RESIDENTS}" in out
            assert f"{service.name}/{cgroups.PREFIX}" in out
            assert "'memory.max': '67108864'" in out and "'pids.max': '5'" in out
            assert "'cpu.max': '50000 100000'" in out
            assert cgroups.members(service / cgroups.RESIDENTS) == [neighbour.pid]
        finally:
            neighbour.kill()
            neighbour.communicate()

    def test_controllers_that_are_not_given_are_told(self, service: Path) -> None:
        (service.parent / "cgroup.subtree_control").write_text("-cpu")
        out = said(run_in([service], f"exec {sys.executable} -c '{NESTED}'"))
        assert "'cpu': 'none (not available in" in out and "'pids': 'cgroup v2'" in out, out
        assert "'pids.max': '5'" in out and "cpu.max" not in out

    def test_in_a_container_the_root_is_not_the_root(self, service: Path) -> None:
        mounted = "umount /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && "
        mounted += "cat /proc/self/cgroup && "
        command = f"'{mounted} exec {sys.executable} -c \"$0\"'"
        script = f"exec unshare --cgroup --mount bash -c {command}"
        out = said(run_in([service], f"{script} '{NESTED}'"))
        assert out.startswith("0::/\n") and out.count("'memory': 'cgroup v2'") == 2, out

    def test_a_read_only_file_system_is_told(self, service: Path) -> None:
        read_only = "mount -o remount,bind,ro /sys/fs/cgroup && "
        script = f"exec unshare --mount bash -c '{read_only} exec {sys.executable} -c \"$0\"'"
        out = said(run_in([service], f"{script} '{NESTED}'"))
        assert "'memory': 'none (Read-only file system in /sys/fs/cgroup/atest.slice" in out, out
        assert "[]" in out
