"""Odd task.toml files, instructions, solutions, images, users and file names."""

from __future__ import annotations

import os
from pathlib import Path

from agent_server_helpers import CHECK, SOLVE
from odd_tasks_kinds import (
    BASH,
    DOCKERFILE,
    INVALID,
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

WINDOWS = 'schema_version = "1.4"\n[environment]\nos = "windows"\n'
STRANGE = (
    '[environment.env]\nONE = "it\'s \\"quoted\\" $HOME"\nTWO = "a\\nb"\nTHREE = "ü"\nFOUR = ""\n'
)
STRANGE_CHECK = (
    f"{PASSED} && [ \"$ONE\" = 'it'\\''s \"quoted\" $HOME' ] && [ \"$TWO\" = $'a\\nb' ]"
    ' && [ "$THREE" = ü ] && [ "${FOUR-unset}" = \'\' ]'
)
HEALTHCHECK = "[environment.healthcheck]\ninterval_sec = 0.1\nretries = 1\nstart_period_sec = 0.0\n"
USERS = "FROM debian\nRUN useradd -m dev && mkdir -p /app && chmod 777 /app\nWORKDIR /app\n"
AS_DEV = f'{BASH}[ "$(id -un)" = dev ] && echo 42 > /app/answer.txt\n'
NAMES = ["with space", "-rf", "ünï©ode-日本", "new\nline", "quo'te\"s", "$(touch x)", "x" * 200]


def limit(table: str, key: str, value: str) -> Odd:
    files = {"task.toml": f"{OLD}[{table}]\n{key} = {value}\n"}
    return Odd(INVALID, f"{table}.{key} = {value}", files)


def image(dockerfile: str | bytes) -> dict[str, str | bytes | None]:
    return {"environment/Dockerfile": dockerfile}


# ---- what cannot be written as text ---------------------------------------------------


def odd_names(task: Path) -> None:
    for place in ("environment/data", "tests/data", "solution/data"):
        (task / place).mkdir(parents=True)
        for name in NAMES:
            (task / place / name).write_text(name)
    check = "n=$(ls /tests/data | grep -c .); m=$(ls /app/data | grep -c .)"
    passed = f'{PASSED} && [ "$n" = "$m" ] && [ -f "/app/data/-rf" ] && [ ! -e x ]'
    (task / "tests/test.sh").write_text(graded(passed, check))
    (task / "environment/Dockerfile").write_text(DOCKERFILE + "COPY data /app/data\n")


def binary(task: Path) -> None:
    for place in ("environment/blob.bin", "tests/blob.bin", "solution/blob.bin"):
        (task / place).write_bytes(bytes(range(256)) * 64)
    (task / "environment/Dockerfile").write_text(DOCKERFILE + "COPY blob.bin /app/blob.bin\n")
    (task / "tests/test.sh").write_text(graded(f"{PASSED} && cmp /tests/blob.bin /app/blob.bin"))


def links_inside(task: Path) -> None:
    (task / "environment/real.txt").write_text("real\n")
    (task / "environment/link.txt").symlink_to("real.txt")
    (task / "tests/real.sh").write_text(CHECK)
    (task / "tests/test.sh").write_text(BASH + ". /tests/link.sh\n")
    (task / "tests/link.sh").symlink_to("real.sh")


def link_out(task: Path) -> None:
    (task / "environment/data").mkdir()
    (task / "environment/data/host").symlink_to("/etc/machine-id-of-the-host")
    (task / "environment/Dockerfile").write_text(DOCKERFILE + "COPY data /app/data\n")
    (task / "tests/test.sh").write_text(graded(f"{PASSED} && [ -L /app/data/host ]"))


def link_source(task: Path) -> None:
    (task / "environment/host").symlink_to("/etc/hostname")
    (task / "environment/Dockerfile").write_text(DOCKERFILE + "COPY host /app/host\n")


def loops(task: Path) -> None:
    (task / "environment/a").symlink_to("b")
    (task / "environment/b").symlink_to("a")
    (task / "tests/loop").symlink_to(".")


def no_text(task: Path) -> None:
    for place in ("environment", "tests", "solution"):
        Path(os.fsdecode(os.fsencode(task / place) + b"/bad\xff\xfename")).write_text("x")


def pipes(task: Path) -> None:
    for place in ("pipe", "environment/pipe", "tests/pipe", "solution/pipe"):
        os.mkfifo(task / place)


def linked_tests(task: Path) -> None:
    (task / "tests/test.sh").unlink()
    (task / "tests").rmdir()
    (task / "tests").symlink_to("/usr")


def extra_files(task: Path) -> None:
    for path in (".git/HEAD", "README.md", "tests/__pycache__/a.pyc", "environment/.DS_Store"):
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_bytes(b"\x00extra")
    (task / "environment/docs").mkdir()


def not_executable(task: Path) -> None:
    for path in ("tests/test.sh", "solution/solve.sh"):
        os.chmod(task / path, 0o644)


CONFIG = {
    "old-memory": Odd(
        SOLVED,
        'schema "1.0", memory = "2G", storage = "1G"',
        {"task.toml": OLD + '[environment]\nmemory = "2G"\nstorage = "1G"\ncpus = 1\n'},
        quick=True,
    ),
    "new-schema": Odd(
        SOLVED, "schema 1.4 with tables of free text", {"task.toml": toml('[metadata]\na = "Ä"\n')}
    ),
    "bare-toml": Odd(SOLVED, "an empty task.toml: all defaults", {"task.toml": ""}),
    "unknown-keys": Odd(
        SOLVED,
        "keys that the schema does not know say nothing",
        {"task.toml": toml('surprise = 1\n[more.tables]\nx = "y"\n')},
    ),
    "crlf-toml": Odd(SOLVED, "Windows line ends", {"task.toml": toml().replace("\n", "\r\n")}),
    "bom-toml": Odd(
        INVALID, "TOML has no byte order mark", {"task.toml": b"\xef\xbb\xbf" + toml().encode()}
    ),
    "broken-toml": Odd(
        INVALID, "TOML that does not parse", {"task.toml": "[environment\n"}, quick=True
    ),
    "latin-toml": Odd(INVALID, "not UTF-8", {"task.toml": b'[metadata]\na = "J\xf6rg"\n'}),
    "wrong-memory": Odd(
        INVALID,
        'memory = "lots"',
        {"task.toml": OLD + '[environment]\nmemory = "lots"\n'},
        quick=True,
    ),
    "no-agent-time": limit("agent", "timeout_sec", "0"),
    "nan-agent-time": limit("agent", "timeout_sec", "nan"),
    "negative-verifier-time": limit("verifier", "timeout_sec", "-5"),
    "no-build-time": limit("environment", "build_timeout_sec", "0.0"),
    "negative-memory": limit("environment", "memory_mb", "-512"),
    "negative-cpus": limit("environment", "cpus", "-1"),
    "no-storage": Odd(
        SOLVED,
        "storage_mb = 0 and memory_mb = 0 are the defaults, as for Docker",
        {"task.toml": OLD + "[environment]\nstorage_mb = 0\nmemory_mb = 0\n"},
    ),
    "windows": Odd(
        UNSUPPORTED,
        'os = "windows"',
        {"task.toml": WINDOWS, "tests/test.bat": "exit 0", "solution/solve.bat": "exit 0"},
    ),
    "windows-workdir": Odd(
        SOLVED,
        "a workdir of Windows is a folder with an odd name",
        {"task.toml": toml().replace('"/app"', '"C:\\\\app"')},
    ),
    "gpu": Odd(UNSUPPORTED, "gpus = 1", {"task.toml": toml("gpus = 1\n")}, quick=True),
    "tiny-memory": Odd(
        INVALID,
        "memory_mb = 1: nothing starts",
        {"task.toml": toml().replace("memory_mb = 512", "memory_mb = 1")},
    ),
    "workdir-missing": Odd(
        SOLVED,
        "a workdir that the image lacks is made",
        {
            "task.toml": toml().replace('"/app"', '"/srv/not/there"'),
            "solution/solve.sh": BASH + "mkdir -p /app; echo 42 > /app/answer.txt\n",
        },
    ),
    "odd-env": Odd(
        SOLVED,
        "variables with quotes, line ends, dollars and letters of all kinds",
        {"task.toml": toml(STRANGE), "tests/test.sh": graded(STRANGE_CHECK)},
        quick=True,
    ),
    "env-no-variable": Odd(
        INVALID,
        "a name with = and a value with a null byte",
        {"task.toml": toml('[environment.env]\n"A=B" = "c"\nC = "a\\u0000b"\n')},
    ),
    "null-workdir": Odd(
        INVALID, "no path", {"task.toml": toml().replace('"/app"', '"/a\\u0000b"')}
    ),
    "env-of-host": Odd(
        INVALID,
        "wants a variable that is not set here",
        {"task.toml": toml('[environment.env]\nKEY = "${SOME_KEY_OF_NOBODY}"\n')},
    ),
    "env-secret": Odd(
        INVALID,
        "wants the token of the agent server",
        {"task.toml": toml(verifier='env = {KEY = "${HARBOR_ADMIN_SECRET}"}')},
    ),
    "healthcheck": Odd(SOLVED, "health", {"task.toml": toml(HEALTHCHECK + 'command = "true"\n')}),
    "unhealthy": Odd(
        both(Cause.SANDBOX_FAILED),
        "a health check that never passes",
        {"task.toml": toml(HEALTHCHECK + 'command = "false"\n')},
    ),
}

FILES = {
    "no-solution": Odd(
        (Cause.TASK_INVALID, 0.0),
        "there is nothing for the oracle to run",
        {"solution/solve.sh": None},
        quick=True,
    ),
    "empty-solution": Odd(both(0.0), "nothing is solved", {"solution/solve.sh": ""}),
    "crlf-solution": Odd(
        both(0.0),
        "a solution that no shell can start solves nothing",
        {"solution/solve.sh": SOLVE.replace("\n", "\r\n")},
    ),
    "failing-solution": Odd(
        SOLVED, "exit 3 of a solution that did its work", {"solution/solve.sh": SOLVE + "exit 3\n"}
    ),
    "huge-instruction": Odd(SOLVED, "4 MB", {"instruction.md": "Write 42 to a file.\n" * 200_000}),
    "empty-instruction": Odd(SOLVED, "no agent here reads it", {"instruction.md": ""}),
    "no-instruction": Odd(INVALID, "instruction.md is missing", {"instruction.md": None}),
    "extra-files": Odd(SOLVED, "git data, caches, empty folders", arrange=extra_files),
    "binary": Odd(SOLVED, "binary files everywhere", arrange=binary),
    "odd-names": Odd(
        SOLVED,
        "spaces, line ends, dashes and letters of all kinds in names",
        arrange=odd_names,
        quick=True,
    ),
    "names-no-text": Odd(INVALID, "names that are not UTF-8", arrange=no_text),
    "pipes": Odd(SOLVED, "pipes between the files", arrange=pipes),
    "link-loops": Odd(INVALID, "links in circles", arrange=loops),
    "links-inside": Odd(SOLVED, "links between files of the task", arrange=links_inside),
    "link-out": Odd(SOLVED, "a link out of the context stays a link", arrange=link_out),
    "link-source": Odd(INVALID, "COPY of a link out of the context", arrange=link_source),
    "linked-tests": Odd(INVALID, "tests/ is a link to a folder of the host", arrange=linked_tests),
    "not-executable": Odd(SOLVED, "scripts without the x bit", arrange=not_executable),
    "no-shebang": Odd(
        SOLVED,
        "scripts without a first line",
        {"tests/test.sh": CHECK.replace(BASH, ""), "solution/solve.sh": SOLVE.replace(BASH, "")},
    ),
}

IMAGES = {
    "compose": Odd(
        UNSUPPORTED,
        "services",
        {"environment/docker-compose.yaml": "services: {main: {build: .}}\n"},
        quick=True,
    ),
    "apt-image": Odd(
        UNSUPPORTED,
        "RUN apt-get install",
        image(DOCKERFILE + "RUN apt-get update && \\\n  apt-get install -y cowsay\n"),
    ),
    "apt-image-here": Odd(
        SOLVED,
        "RUN apt-get install of what the host has",
        image(DOCKERFILE + "RUN apt-get update && apt-get install -y bash coreutils\n"),
    ),
    "pip-image": Odd(
        UNSUPPORTED, "RUN pip install", image("FROM python\nRUN pip install cowsay==6.1\n")
    ),
    "silent-pip-image": Odd(
        UNSUPPORTED,
        "RUN pip install || true looks for a name",
        image("FROM python\nRUN pip install cowsay >/dev/null 2>&1 || true\nWORKDIR /app\n"),
    ),
    "other-image": Odd(
        UNSUPPORTED, "an image that is nowhere", image("FROM nowhere.test/a/b:1\n"), quick=True
    ),
    "no-from": Odd(INVALID, "a Dockerfile without FROM", image("RUN true\n"), quick=True),
    "empty-dockerfile": Odd(INVALID, "an empty Dockerfile", image("")),
    "crlf-dockerfile": Odd(
        SOLVED,
        "Windows line ends",
        image((DOCKERFILE + "RUN echo a \\\n  b > /c\n").replace("\n", "\r\n")),
    ),
    "bom-dockerfile": Odd(
        SOLVED, "a byte order mark", image(b"\xef\xbb\xbf" + DOCKERFILE.encode())
    ),
    "user-named": Odd(
        SOLVED,
        "agent.user = 'dev' of the image",
        {"task.toml": toml(agent="user = 'dev'"), "solution/solve.sh": AS_DEV, **image(USERS)},
        quick=True,
    ),
    "user-number": Odd(
        SOLVED,
        "agent.user = 4321, in no list of users",
        {
            "task.toml": toml(agent="user = 4321"),
            "solution/solve.sh": AS_DEV.replace("-un", "-u").replace("dev", "4321"),
            **image(USERS),
        },
    ),
    "user-missing": Odd(
        (Cause.SANDBOX_FAILED, 0.0),
        "agent.user that nobody made",
        {"task.toml": toml(agent="user = 'ghost'")},
    ),
    "user-of-verifier": Odd(
        SOLVED,
        "verifier.user writes the reward",
        {
            "task.toml": toml(verifier="user = 'dev'"),
            "tests/test.sh": graded(f'{PASSED} && [ "$(id -un)" = dev ]'),
            **image(USERS),
        },
    ),
    "user-of-image": Odd(
        SOLVED,
        "USER of the Dockerfile is the agent's and the verifier's",
        {
            "solution/solve.sh": AS_DEV,
            "tests/test.sh": graded(f'{PASSED} && [ "$(id -un)" = dev ]'),
            **image(USERS + "USER dev\n"),
        },
    ),
}

ODD = {**CONFIG, **FILES, **IMAGES}
