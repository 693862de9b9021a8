"""What code inside a sandbox can see and do."""

from __future__ import annotations

import http.server
import os
import threading
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, ScriptedModel, bash  # noqa: E402
from agent_server_helpers import TOML, Server, make_task  # noqa: E402

pytestmark = pytest.mark.agent_env


def outputs(server: Server, commands: list[str], task: str = "answer") -> list[str]:
    """What an agent sees of each command, through the prompts that it is given."""
    model = ScriptedModel([*[bash(command) for command in commands], bash(DONE)])
    try:
        result = server.run(task, "mini-swe-agent", base_url=model.url)
    finally:
        model.close()
    assert result.agent_metrics.turns == len(commands) + 1, result.verdict
    return [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]


def test_the_session_and_nothing_else_is_reachable(server: Server) -> None:
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    connect = "timeout 5 bash -c 'echo > /dev/tcp/{}' 2>&1 && echo open"
    try:
        local, outside, agent_server, names = outputs(
            server,
            [
                connect.format(f"127.0.0.1/{other.server_port}"),
                connect.format("1.1.1.1/80"),
                connect.format(f"127.0.0.1/{server.port}"),
                "cat /proc/net/dev | tail -n +3 | cut -d: -f1",
            ],
        )
    finally:
        other.shutdown()
        other.server_close()
    assert "refused" in local and "open" not in local
    assert "unreachable" in outside and "open" not in outside
    assert "refused" in agent_server and "open" not in agent_server
    assert names.split() == ["0", "lo"]


def test_files_of_the_host_are_not_visible(server: Server, tasks: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    paths = [secret, tasks, server.trials, Path("/etc/machine-id"), Path.home() / ".ssh", "/work"]
    tests, *seen = outputs(
        server,
        ["ls -d /tests /solution 2>&1; find / -path /opt/miles -prune -o -name solve.sh -print"]
        + [f"ls -d {path} >/dev/null 2>&1 && echo visible || echo absent" for path in paths],
    )
    assert tests.count("No such file") == 2 and "solve.sh" not in tests
    assert [line.split()[-1] for line in seen] == ["absent"] * len(paths)


def test_processes_of_the_host_are_not_visible(server: Server) -> None:
    (listed,) = outputs(server, ["ls /proc | grep -c '^[0-9]'; echo; ls /proc | grep -x 1"])
    assert int(listed.split()[1]) < 15


def test_kernel_settings_and_mounts_are_refused(server: Server) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    written, mounted, node, capable = outputs(
        server,
        [
            "echo sandboxed > /proc/sys/kernel/core_pattern; echo $?",
            "mount -t tmpfs x /mnt 2>&1; echo $?",
            "mknod /tmp/disk b 8 0 2>&1; echo $?",
            "grep -h CapBnd /proc/self/status; grep NoNewPrivs /proc/self/status",
        ],
    )
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert [text.split()[-1] != "0" for text in (written, mounted, node)] == [True] * 3
    bounding = int(capable.split("CapBnd:")[1].split()[0], 16)
    assert not bounding & (1 << 21), "CAP_SYS_ADMIN is in the bounding set"
    assert capable.split()[-1] == "1"


def test_the_host_system_is_not_written(server: Server) -> None:
    (text,) = outputs(server, ["rm -rf /usr/bin/env && touch /usr/bin/planted && echo done"])
    assert "done" in text
    assert os.path.exists("/usr/bin/env") and not os.path.exists("/usr/bin/planted")


def test_limits_hold(server: Server, tasks: Path) -> None:
    toml = TOML.replace("memory_mb = 512", "memory_mb = 256")
    make_task(tasks, "limited", toml=toml)
    if not server.call(lambda client: client.health()).limits["memory"].startswith("cgroup"):
        pytest.skip("this host lets nobody write cgroups")
    memory, disk, pids = outputs(
        server,
        [
            "python3 -c 'x = bytearray(600 << 20); print(len(x))' 2>&1; echo code $?",
            "head -c 100M /dev/zero > /app/big 2>&1; stat -c %s /app/big; rm /app/big",
            "for i in $(seq 700); do sleep 3 & done 2>&1 | tail -1; echo ended",
        ],
        "limited",
    )
    assert "code 137" in memory
    assert int(disk.split()[-1]) <= 64 << 20
    assert "Cannot fork" in pids or "Resource temporarily unavailable" in pids


def test_agent_that_ends_everything_is_graded(server: Server) -> None:
    """`kill -9 -1` ends the agent, not the sandbox: the verifier still grades."""
    model = ScriptedModel([bash("echo 42 > /app/answer.txt; kill -9 -1"), bash(DONE)])
    try:
        result = server.run("answer", "mini-swe-agent", base_url=model.url)
    finally:
        model.close()
    assert result.reward == 1.0, result.verdict


SYSCALLS = """python3 - <<'EOF'
import ctypes, errno, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    result = libc.syscall(*[ctypes.c_long(number) for number in numbers])
    return "went through" if result >= 0 else errno.errorcode[ctypes.get_errno()]
print("keys", call(250, 0, -3, 0))
print("mount", call(165, 0, 0, 0, 0, 0))
print("bpf", call(321, 0, 0, 0))
print("clone3", call(435, 0, 0))
print("io_uring", call(425, 1, 0))
print("user namespace", call(272, 0x10000000))
print("clone", call(56, 0x10000011, 0, 0, 0, 0))
for name, family in [("vsock", 40), ("alg", 38), ("packet", 17)]:
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print(name, "went through")
    except OSError as error:
        print(name, errno.errorcode[error.errno])
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family, socket.SOCK_STREAM).close()
made = threading.Thread(target=print, args=("thread", "works"))
made.start(); made.join()
EOF"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of one architecture")
def test_system_calls_that_no_task_needs_are_refused(server: Server) -> None:
    status, calls, shell = outputs(
        server, ["grep Seccomp: /proc/self/status", SYSCALLS, "unshare --user true; echo $?"]
    )
    assert "Seccomp:\t2" in status
    seen = dict(line.rsplit(" ", 1) for line in calls.splitlines() if " " in line)
    assert {name: seen[name] for name in ("keys", "mount", "bpf", "user namespace", "clone")} == (
        dict.fromkeys(("keys", "mount", "bpf", "user namespace", "clone"), "EPERM")
    )
    assert seen["clone3"] == seen["io_uring"] == "ENOSYS"
    assert seen["vsock"] == seen["alg"] == seen["packet"] == "EAFNOSUPPORT"
    assert seen["thread"] == "works"
    assert "1" in shell and "not permitted" in shell.lower()
