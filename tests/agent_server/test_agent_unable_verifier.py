"""A verifier that could not do its work gives no grade; one that could does."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_server_helpers import CHECK, SOLVE, TOML, Server, make_task  # noqa: E402

from miles_core.agent_server.sandbox import accounts, lookups  # noqa: E402
from miles_core.agent_server.sandbox.errors import SandboxError  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

OLD = 'version = "1.0"\n[environment]\nmemory = "512M"\nstorage = "100M"\n'
GRADE = "if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def run(server: Server, tasks: Path, name: str, script: str, agent: str = "nop", **fields):
    """A trial of a task whose test.sh is `script`, with /tests/check.py from `check`."""
    check = fields.pop("check", "")
    instruction = fields.pop("instruction", "Do it.\n")
    task = make_task(tasks, name, toml=OLD, test=f"#!/bin/bash\n{script}\n{GRADE}", **fields)
    (task / "tests" / "check.py").write_text(check)
    (task / "instruction.md").write_text(instruction)
    return server.run(name, agent)


RESOLVE = "import socket\nsocket.getaddrinfo('files.example.org', 443)\n"
UNABLE = {
    "quiet-lookup": ("python3 /tests/check.py 2>/dev/null", RESOLVE, "files.example.org"),
    "direct": (
        "python3 /tests/check.py",
        "import socket\nsocket.create_connection(('192.0.2.1', 80))\n",
        "Network is unreachable",
    ),
    "no-runner": ("uvx pytest-of-nobody /tests", "", "uvx: command not found"),
    "no-module": ("python3 /tests/check.py", "import notapackage\n", "notapackage"),
}


@pytest.mark.parametrize("kind", sorted(UNABLE))
def test_low_reward_of_an_unable_verifier_is_no_grade(
    server: Server, tasks: Path, kind: str
) -> None:
    script, check, sign = UNABLE[kind]
    script = script.replace("uvx ", "U=uvx; $U ")  # what the look at the text does not see
    result = run(server, tasks, f"unable-{kind}", script, check=check)
    assert result.verdict.kind is VerdictKind.NO_VERDICT, result.verdict
    assert result.verdict.cause is Cause.VERIFIER_FAILED and sign in result.verdict.detail


GRADED = {
    "own-command": ({"script": "greet bob"}, 0.0),
    "own-module": (
        {
            "script": "cd /app && PYTHONPATH=/app python3 /tests/check.py",
            "check": "from answer import value\n",
            "instruction": "Write /app/answer.py with a function value.\n",
        },
        0.0,
    ),
    "full-marks": ({"script": "python3 /tests/check.py; true", "check": RESOLVE}, 1.0),
    "local-names": ({"script": "getent hosts nothing.local db; false"}, 0.0),
}


@pytest.mark.parametrize("kind", sorted(GRADED))
def test_what_the_agent_did_not_do_is_graded(server: Server, tasks: Path, kind: str) -> None:
    fields, reward = GRADED[kind]
    result = run(server, tasks, f"able-{kind}", **fields)
    assert (result.verdict.kind, result.reward) == (VerdictKind.GRADED, reward), result.verdict


def test_what_the_agent_left_running_does_not_excuse_it(server: Server, tasks: Path) -> None:
    """A daemon that asks for names while the verifier runs cannot turn a zero into no verdict."""
    daemon = (
        "until [ -e /tmp/go ]; do sleep 0.1; done; getent hosts left.example.org; touch /tmp/asked"
    )
    solve = f"#!/bin/bash\n(setsid bash -c '{daemon}' >/dev/null 2>&1 &)\n"
    test = "#!/bin/bash\ntouch /tmp/go\nuntil [ -e /tmp/asked ]; do sleep 0.1; done\n"
    test += "echo 0 > /logs/verifier/reward.txt\n"
    make_task(tasks, "left-asking", solve=solve, test=test)
    result = server.run("left-asking")
    assert (result.verdict.kind, result.reward) == (VerdictKind.GRADED, 0.0), result.verdict


def test_a_task_may_have_a_name_server_of_its_own(server: Server, tasks: Path) -> None:
    serve = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    serve += "s.bind((chr(48) + '.0.0.0', 53)); open('/tmp/up', 'w').close(); "
    serve += "d, a = s.recvfrom(99); s.sendto(d, a)"
    solve = f'#!/bin/bash\n(setsid python3 -c "{serve}" >/tmp/log 2>&1 &)\n'
    solve += (
        "for i in $(seq 50); do [ -e /tmp/up ] && exit 0; sleep 0.1; done; cat /tmp/log; exit 1\n"
    )
    ask = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); "
    ask += "s.sendto(b'hello', ('127.0.0.1', 53)); assert s.recv(99) == b'hello'"
    test = f'#!/bin/bash\npython3 -c "{ask}" && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
    make_task(tasks, "name-server", solve=solve, test=test)
    assert server.run("name-server").reward == 1.0


def test_network_of_the_build_and_of_the_solution(server: Server, tasks: Path) -> None:
    quiet = "FROM debian\nCOPY look.py /\nRUN python3 /look.py || true\nWORKDIR /app\n"
    make_task(tasks, "quiet-build", toml=OLD, dockerfile=quiet)
    (tasks / "quiet-build" / "environment" / "look.py").write_text(RESOLVE)
    built = server.run("quiet-build").verdict
    assert built.cause is Cause.SANDBOX_UNSUPPORTED
    assert "line 3" in built.detail and "files.example.org" in built.detail
    make_task(tasks, "net-solution", toml=OLD, solve="#!/bin/bash\ngetent hosts a.example.org\n")
    solved = server.run("net-solution").verdict
    assert solved.cause is Cause.SANDBOX_UNSUPPORTED and "a.example.org" in solved.detail
    assert server.run("net-solution", "nop").reward == 0.0


def test_missing_reward_says_what_the_verifier_said(server: Server, tasks: Path) -> None:
    make_task(tasks, "crlf", test="#!/bin/bash\r\ntrue\r\n")
    step = TOML + '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
    steps = make_task(tasks, "crlf-step", toml=step)
    for name in ("a", "b"):
        script = CHECK if name == "a" else CHECK.replace("\n", "\r\n")
        for path, text in (("instruction.md", "Do it."), ("tests/test.sh", script)):
            (steps / "steps" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (steps / "steps" / name / path).write_bytes(text.encode())
    assert "; steps/b/tests/test.sh cannot be run" in server.run("crlf-step", "nop").verdict.detail
    make_task(tasks, "gives-up", test="#!/bin/bash\necho the database is broken\nexit 3\n")
    verdict = server.run("crlf").verdict
    assert verdict.cause is Cause.REWARD_MISSING
    words = "tests/test.sh cannot be run: its lines end with CR LF, not LF; .*file not found"
    assert re.search(words, verdict.detail), verdict.detail
    broken = server.run("gives-up").verdict
    assert broken.cause is Cause.REWARD_MISSING and "the database is broken" in broken.detail


@pytest.mark.parametrize("value", ["1e300", "1" + "0" * 400])
def test_reward_without_measure_is_invalid(server: Server, tasks: Path, value: str) -> None:
    script = f"#!/bin/bash\necho '{{\"reward\": {value}}}' > /logs/verifier/reward.json\n"
    make_task(tasks, f"measure-{len(value)}", test=script)
    verdict = server.run(f"measure-{len(value)}").verdict
    assert verdict.cause is Cause.REWARD_INVALID, verdict


@pytest.mark.parametrize(
    "table",
    [
        "[agent]\ntimeout_sec = 0",
        "[verifier]\ntimeout_sec = -1",
        "[environment]\nbuild_timeout_sec = 0",
    ],
)
def test_time_limits_must_leave_time(server: Server, tasks: Path, table: str) -> None:
    name = f"limit-{table[1:4]}"
    make_task(tasks, name, toml=f'version = "1.0"\n{table}\n')
    verdict = server.run(name).verdict
    assert verdict.cause is Cause.TASK_INVALID and "is not above 0" in verdict.detail


def test_removed_log_directories_do_not_cost_the_grade(server: Server, tasks: Path) -> None:
    make_task(tasks, "no-logs", solve=SOLVE + "rm -rf /logs\n")
    assert server.run("no-logs").reward == 1.0


def test_users_and_the_path_of_an_image(server: Server, tasks: Path) -> None:
    dockerfile = (
        'FROM debian\nENV PATH="/extra/bin:$PATH"\n'
        "RUN useradd -m dev && mkdir -p /app && chmod 777 /app\nWORKDIR /app\n"
    )
    solve = '#!/bin/bash\n[ "$(id -u):$(id -g)" = "$EXPECTED" ] && echo 42 > /app/answer.txt\n'
    expected = {"'dev'": "1000:1000", "4321": "4321:0", "'4321:5'": "4321:5"}
    for number, (user, ids) in enumerate(expected.items()):
        toml = f"{OLD}[agent]\nuser = {user}\n[solution.env]\nEXPECTED = '{ids}'\n"
        make_task(tasks, f"user-{number}", toml=toml, dockerfile=dockerfile, solve=solve)
        result = server.run(f"user-{number}")
        assert result.reward == 1.0, (user, result.verdict)
    make_task(tasks, "user-ghost", toml=f"{OLD}[agent]\nuser = 'ghost'\n")
    verdict = server.run("user-ghost").verdict
    assert verdict.cause is Cause.SANDBOX_FAILED and "ghost" in verdict.detail


def test_account_of_a_name_that_is_not_there() -> None:
    users = "root:x:0:0:root:/root:/bin/sh\ndev:x:7:8::/home/dev:\n"
    listed = f"{users}\nroot:x:0:\nstaff:x:50:ann\naudio:x:29:ann,dev\n"
    assert accounts.find("dev", listed) == accounts.Account(7, 8, "/home/dev", (29,))
    assert accounts.find("dev:staff", listed) == accounts.Account(7, 50, "/home/dev")
    for user in ("ghost", "dev:ghosts"):
        with pytest.raises(SandboxError, match="ghost"):
            accounts.find(user, listed)


def test_questions_of_queries() -> None:
    header = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0)
    query = header + b"\x04Pypi\x03org\x00\x00\x01\x00\x01"
    assert lookups.question(query) == "pypi.org"
    assert lookups.question(query[:15]) is None and lookups.question(b"") is None
    answer = struct.pack("!6H", 7, 0x8100, 1, 0, 0, 0) + query[12:]
    assert lookups.question(answer) is None
    assert lookups.is_public("pypi.org")
    assert not any(map(lookups.is_public, ["localhost", "db", "a.local", "1.0.0.127.in-addr.arpa"]))
