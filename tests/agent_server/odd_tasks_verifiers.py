"""Odd tests, rewards, networks and tasks of several steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent_server_helpers import CHECK, SOLVE
from odd_tasks_kinds import (
    BAD_REWARD,
    BASH,
    INVALID,
    NO_REWARD,
    OLD,
    PASSED,
    SOLVED,
    UNSUPPORTED,
    Odd,
    both,
    graded,
    toml,
)

from miles_core.verdicts import Cause

FETCH = """import sys, urllib.request
try:
    urllib.request.urlopen("https://files.example.org/list", timeout=3)
except OSError:
    sys.exit(1)
"""
CTRF = """{"results": {"tool": {"name": "pytest"}, "tests": [
{"name": "test_a", "status": "passed", "duration": 1},
{"name": "test_b", "status": "failed", "duration": 1}]}}"""
READ_ONLY = "cd /logs/verifier; mkdir -p ro/x; echo a > ro/x/f; chmod -R a-w ro"
HALF = BASH + "echo 0.5 > /logs/verifier/reward.txt\n"


def tests(script: str | bytes) -> dict[str, str | bytes | None]:
    return {"tests/test.sh": script}


def networked(line: str) -> dict[str, str | bytes | None]:
    """Tests of an old task, which says nothing of the network, with a line that needs it."""
    script = f"{BASH}{line}\nif [ $? -eq 0 ] && {PASSED}; then r=1; else r=0; fi\n"
    script += "echo $r > /logs/verifier/reward.txt\n"
    return {"task.toml": OLD, "tests/test.sh": script, "tests/check.py": FETCH}


def reward_json(text: str) -> Odd:
    script = f"{BASH}cat > /logs/verifier/reward.json <<'END'\n{text}\nEND\n"
    return Odd(BAD_REWARD, f"reward.json is {text[:40]}", tests(script))


def reward_text(command: str) -> dict[str, str | bytes | None]:
    return tests(f"{BASH}{command} /logs/verifier/reward.txt\n")


def steps(
    first: str = CHECK, second: str = CHECK, head: str = "", step: str = ""
) -> Callable[[Path], None]:
    """A task of two steps with these tests; `head` and `step` are lines of its task.toml."""

    def arrange(task: Path) -> None:
        text = f'schema_version = "1.4"\n{head}\n[environment]\nnetwork_mode = "no-network"\n'
        text += 'workdir = "/app"\n'
        for name, script in (("one", first), ("two", second)):
            text += f"[[steps]]\nname = '{name}'\n{step}\n[steps.verifier]\ntimeout_sec = 20\n"
            files = {"instruction.md": name, "tests/test.sh": script, "solution/solve.sh": SOLVE}
            for path, content in files.items():
                file = task / "steps" / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
        (task / "task.toml").write_text(text)

    return arrange


TESTS = {
    "empty-tests": Odd(NO_REWARD, "an empty test.sh writes nothing", tests("")),
    "no-tests": Odd(both(Cause.TASK_INVALID), "no test.sh", {"tests/test.sh": None}, quick=True),
    "crlf-tests": Odd(
        NO_REWARD, "no shell can start it", tests(CHECK.replace("\n", "\r\n")), quick=True
    ),
    "bom-tests": Odd(SOLVED, "a byte order mark", tests(b"\xef\xbb\xbf" + CHECK.encode())),
    "other-shell": Odd(
        NO_REWARD,
        "an interpreter that is not there",
        tests("#!/usr/bin/fish\necho 1 > /logs/verifier/reward.txt\n"),
    ),
    "loud": Odd(
        SOLVED,
        "100 MB of output",
        {
            "task.toml": toml().replace("storage_mb = 64", "storage_mb = 512"),
            "tests/test.sh": graded(before="head -c 100000000 /dev/zero | tr '\\0' x"),
        },
    ),
    "very-loud": Odd(
        SOLVED,
        "400 MB of output, of which the end is kept",
        {
            "task.toml": toml().replace("storage_mb = 64", "storage_mb = 1000"),
            "tests/test.sh": graded(before="head -c 400000000 /dev/zero | tr '\\0' x"),
        },
    ),
    "kill-all": Odd(
        NO_REWARD,
        "tests that kill every process, themselves too",
        tests(graded(before="kill -9 -1; kill -9 $$")),
        quick=True,
    ),
    "remove-all": Odd(
        SOLVED,
        "tests that remove the programs after their reward, which is read without one",
        tests(graded(after="rm -rf /usr/bin /bin 2>/dev/null")),
    ),
    "folder-tests": Odd(
        INVALID,
        "test.sh is a folder",
        {"tests/test.sh": None, "tests/test.sh/keep": ""},
    ),
    "daemons": Odd(
        SOLVED,
        "tests leave processes that hold their output",
        tests(graded(before="sleep 300 & (setsid sleep 300 &); nohup sleep 300 &")),
    ),
    "read-only": Odd(
        SOLVED, "tests leave folders that cannot be written", tests(graded(after=READ_ONLY))
    ),
    "slow-tests": Odd(
        both(Cause.VERIFIER_TIMEOUT),
        "tests beyond their time",
        {
            "tests/test.sh": graded(before="sleep 20"),
            "task.toml": toml().replace("timeout_sec = 30", "timeout_sec = 1"),
        },
    ),
    "crash-before": Odd(NO_REWARD, "a crash before it", tests(graded(before="kill -SEGV $$"))),
    "crash-after": Odd(
        SOLVED,
        "a crash after the reward, which stands",
        tests(graded(after="kill -SEGV $$")),
        quick=True,
    ),
    "exit-status": Odd(SOLVED, "an exit status is no reward", tests(graded(after="exit 7"))),
}

NETWORK = {
    "net-pip": Odd(UNSUPPORTED, "pip install", networked("pip install pytest==8.4.1")),
    "net-apt": Odd(UNSUPPORTED, "apt-get", networked("apt-get update"), quick=True),
    "net-uvx": Odd(UNSUPPORTED, "uvx", networked("uvx -w pytest==8.4.1 pytest /tests")),
    "net-curl": Odd(
        UNSUPPORTED,
        "curl",
        networked("curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh"),
        quick=True,
    ),
    "net-git": Odd(
        UNSUPPORTED, "git clone", networked("git clone https://git.example.org/a/b /tmp/b")
    ),
    "net-python": Odd(
        both(Cause.VERIFIER_FAILED),
        "a Python test fetches, in silence",
        networked("python3 /tests/check.py 2>/dev/null"),
        quick=True,
    ),
    "net-harmless": Odd(
        (1.0, Cause.VERIFIER_FAILED),
        "full marks stand; a zero after a look for a name does not",
        networked("python3 /tests/check.py; true"),
    ),
    "net-declared": Odd(
        SOLVED,
        "the task declares that it needs no network",
        {"tests/test.sh": graded(before="python3 /tests/check.py"), "tests/check.py": FETCH},
        quick=True,
    ),
    "net-of-verifier": Odd(
        UNSUPPORTED,
        "the verifier asks for a network of its own",
        {"task.toml": toml(verifier="network_mode = 'public'")},
    ),
}

REWARDS = {
    "json-wins": Odd(
        SOLVED,
        "reward.json and reward.txt disagree: reward.json counts",
        tests(
            f"{BASH}if {PASSED}; then r=1; else r=0; fi\n"
            'echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
            "echo 0.25 > /logs/verifier/reward.txt\n"
        ),
        quick=True,
    ),
    "json-broken": Odd(
        BAD_REWARD,
        "reward.txt does not make up for a broken reward.json",
        tests(CHECK + "echo '{' > /logs/verifier/reward.json\n"),
    ),
    "json-two-keys": reward_json('{"a": 1, "b": 0}'),
    "json-nested": reward_json('{"reward": {"value": 1}}'),
    "json-list": reward_json("[1]"),
    "json-scalar": reward_json("1"),
    "json-string": reward_json('{"reward": "1"}'),
    "json-null": reward_json('{"reward": null}'),
    "json-nan": reward_json('{"reward": NaN}'),
    "json-huge": reward_json('{"reward": 1e300}'),
    "json-digits": reward_json('{"reward": 1' + "0" * 400 + "}"),
    "json-empty": reward_json("{}"),
    "json-one-key": Odd(
        both(0.5),
        "the only key counts",
        tests(HALF.replace("0.5", "'{\"score\": 0.5}'").replace("reward.txt", "reward.json")),
    ),
    "json-bool": Odd(
        both(1.0),
        "true is 1",
        tests(HALF.replace("0.5", "'{\"reward\": true}'").replace("reward.txt", "reward.json")),
    ),
    "text-spaces": Odd(both(1.0), "white space", reward_text("printf '  1.0 \\r\\n' >")),
    "text-words": Odd(BAD_REWARD, "no number", reward_text("echo passed >")),
    "text-empty": Odd(BAD_REWARD, "an empty file", reward_text(": >")),
    "text-nan": Odd(BAD_REWARD, "not finite", reward_text("echo nan >")),
    "text-binary": Odd(BAD_REWARD, "no text", reward_text("head -c 64 /dev/urandom >")),
    "text-link": Odd(
        NO_REWARD, "a link is no file", reward_text("echo 1 > /tmp/r; ln -s /tmp/r"), quick=True
    ),
    "text-folder": Odd(BAD_REWARD, "a folder", reward_text("mkdir")),
    "text-pipe": Odd(NO_REWARD, "a pipe is no file", reward_text("mkfifo")),
    "text-device": Odd(NO_REWARD, "no device can be made", reward_text("mknod -m 666 c 1 5")),
    "text-gigabyte": Odd(
        both(Cause.VERIFIER_FAILED), "a reward of 1 GB", reward_text("truncate -s 1G")
    ),
    "ctrf": Odd(
        SOLVED,
        "a test report beside the reward",
        tests(f"{CHECK}cat > /logs/verifier/ctrf.json <<'END'\n{CTRF}\nEND\n"),
        quick=True,
    ),
    "ctrf-broken": Odd(
        SOLVED,
        "a broken test report changes nothing",
        tests(CHECK + "echo '{\"results\": [' > /logs/verifier/ctrf.json\n"),
    ),
}

STEPS = {
    "steps": Odd(SOLVED, "two steps", arrange=steps(), quick=True),
    "steps-mean": Odd((0.75, 0.25), "the mean of the steps' rewards", arrange=steps(first=HALF)),
    "steps-final": Odd(
        SOLVED,
        "the last step's reward counts",
        arrange=steps(first=HALF, head='multi_step_reward_strategy = "final"'),
    ),
    "steps-gate": Odd(
        SOLVED, "the second step is not reached by nop", arrange=steps(step="min_reward = 1.0")
    ),
    "steps-ungraded": Odd(
        NO_REWARD,
        "a step without a reward hides behind a graded one",
        arrange=steps(second=BASH + "true\n"),
    ),
}

APART = "artifacts = ['/app/answer.txt']\n" + toml(verifier='environment_mode = "separate"')
SEPARATE = {
    "separate": Odd(
        SOLVED,
        "a sandbox of its own for the verifier, with what the task hands over",
        {"task.toml": APART},
        quick=True,
    ),
    "separate-image": Odd(
        SOLVED,
        "the verifier has an image with its tests",
        {"task.toml": APART, "tests/Dockerfile": "FROM debian:12\nCOPY . /tests\n"},
    ),
    "separate-apt": Odd(
        UNSUPPORTED,
        "the verifier's image needs another one",
        {"task.toml": APART, "tests/Dockerfile": "FROM nowhere.test/a\nCOPY . /tests\n"},
    ),
}

ODD = {**SEPARATE, **TESTS, **NETWORK, **REWARDS, **STEPS}
