"""A hostile agent against its sandbox, in whole trials: what it gets of it, and what verdict.

In the order of what is refused: reading another trial's files, the tests and the solution, the
host, secrets; writing the reward; ending without a verdict. `test_agent_attacks_limits` goes on:
using up processes, memory and disk, other addresses than the session, and links that lead out.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_attacks import (  # noqa: E402
    FORGES,
    HONEST,
    LIBRARY,
    LOADS,
    MINI,
    OPEN_APP,
    REPLACED,
    SEPARATE,
    SLOW,
    SYSTEM_CALLS,
    USERS,
    assert_graded,
    attack,
    endless,
    make_tasks,
    python,
    search,
    slow_but,
)
from agent_scripted_model import DONE, ScriptedModel, bash  # noqa: E402
from agent_server_helpers import SECRET, Server, make_task  # noqa: E402

from miles_core.agent_server.protocol import TrialResult  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of one architecture")


@pytest.fixture(scope="module", autouse=True)
def attacked(tasks: Path) -> None:
    make_tasks(tasks)


@pytest.fixture(params=sorted(USERS))
def task(request: pytest.FixtureRequest) -> str:
    """The usual task, for an agent of one user."""
    return f"by-{request.param}"


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
            ended = "kill -9 -1; true"
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
    assert "threads work" in called
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


@pytest.mark.parametrize("kind", slow_but("folder", "after", "tests-proc", "detach", of=FORGES))
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
    result, _ = attack(server, "separate", HONEST, REPLACED[kind])
    assert_graded(result, 1.0)


@pytest.mark.parametrize("kind", slow_but("preload", of=REPLACED))
def test_other_users_than_root_replace_nothing(server: Server, kind: str) -> None:
    result, _ = attack(server, "by-nobody", REPLACED[kind])
    assert_graded(result, 0.0)


@pytest.mark.parametrize("kind", slow_but("file", "during", "folder", of=LOADS))
def test_a_library_of_the_agents_is_not_loaded_into_the_verifier(server: Server, kind: str) -> None:
    result, seen = attack(server, "by-root", LIBRARY, LOADS[kind])
    assert seen[0].split()[0] == "0", seen
    assert_graded(result, 0.0)


OWN_LIBRARY = """FROM debian:12-slim
WORKDIR /app
RUN printf '__attribute__((constructor)) void f(void) {}' > /tmp/o.c \\
    && gcc -shared -fPIC -o /usr/lib/own.so /tmp/o.c && echo /usr/lib/own.so > /etc/ld.so.preload
"""
LOADED = """#!/bin/bash
grep -q own.so /proc/self/maps && ! grep -q /p.so /proc/self/maps && r=1 || r=0
touch /etc/new && sed -i s/localhost/elsewhere/ /etc/hosts && id nobody || r=0
echo $r > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize("left", [False, True], ids=["alone", "beside a process"])
def test_a_library_of_the_images_is_loaded(server: Server, tasks: Path, left: bool) -> None:
    """And the verifier can still write to /etc and replace what is there."""
    make_task(tasks, "own-library", dockerfile=OWN_LIBRARY, test=LOADED)
    forge = LOADS["during"] if left else LOADS["file"]
    result, _ = attack(server, "own-library", LIBRARY, forge)
    assert_graded(result, 1.0)


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
