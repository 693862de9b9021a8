"""Signs that a verifier could not do its work: a script that does not start, no network, no test
runner, no package.

Such a verifier often still writes a reward, and that is always too low. A reward below 1 is not
taken from a trial with one of these signs.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from miles_core.agent_server.sandbox.privileges import PATH

OUTPUT = "test-stdout.txt"
READ_LIMIT = 256 << 10
"""Bytes of a verifier's output, from its end, and of a task's text file that are looked at."""

DECLARE = "a task whose grade does not depend on it declares network_mode = 'no-network'"

NO_NETWORK = re.compile(
    r"Network is unreachable|Temporary failure in name resolution|Name or service not known"
    r"|Could not resolve host|Failed to resolve '|Temporary failure resolving '"
    r"|getaddrinfo (?:EAI_AGAIN|ENOTFOUND)|dial tcp: lookup |dns error: failed to lookup"
)
NOT_FOUND = re.compile(
    r"^(?:/tests/\S+: line \d+: (?:\S*/)?(\w[\w.+-]*): (?:command not found|No such file)"
    r"|/tests/\S+: \d+: (?:\S*/)?(\w[\w.+-]*): not found"
    r"|/usr/bin/env: \W(\w[\w.+-]*)\W: No such file)",
    re.MULTILINE,
)
"""What a script of the tests says of a program that is missing, in the words of bash and dash."""

TOOLS = re.compile(
    r"py\.?test|uvx?|pip[\d.]*|python[\d.]*|tox|nox|poetry|conda|node|npm|npx|pnpm|yarn|bun|deno"
    r"|cargo|rustc|go|javac?|mvn|gradle|gcc|g\+\+|clang|make|cmake|ruby|bundle|rspec|php|perl"
    r"|Rscript|curl|wget|git|jq|tmux|expect|sqlite3|psql|redis-cli|bc|xxd|file|unzip|zip"
)
"""Programs that tests bring or expect from their image, as against those that an agent makes."""

NO_MODULE = re.compile(r"No module named '?([A-Za-z_]\w*)")
_COMMON = (
    "aiohttp bs4 boto3 click cryptography cv2 datasets django docker dotenv fastapi flask grpc "
    "h5py httpx hypothesis jax jsonschema jwt lightgbm lxml matplotlib nbformat networkx nltk "
    "numba numpy openpyxl pandas paramiko pexpect PIL playwright polars psutil psycopg2 pyarrow "
    "pydantic pytest redis requests rich scipy selenium sklearn spacy sqlalchemy sympy tensorflow "
    "toml tomli torch torchvision tqdm transformers websockets xgboost yaml"
)
PACKAGES = frozenset(_COMMON.split())
"""Modules that are no agent's to write, even where an instruction speaks of them."""


def no_grade(task_dir: Path, trial_dir: Path, names: list[str] | None) -> str | None:
    """Why a low reward of this trial's verifier is no grade, in one line, or None.

    `names` are those that were looked up while the verifier ran; None says that the task declares
    that it needs no network, so that nothing which a verifier misses there spoils a grade.
    """
    script = _unreadable(task_dir)
    if script is not None:
        said = last_words(trial_dir)
        return f"{script} cannot be run: its lines end with CR LF, not LF" + (said and f"; {said}")
    if names:
        looks = f"the verifier looks for {', '.join(names[:5])}, and the sandbox has no network"
        return f"{looks}; {DECLARE}"
    for output in outputs(trial_dir):
        found = NO_NETWORK.search(output)
        if found and names is not None:
            return f"the verifier needs the network: {_line(output, found)}; {DECLARE}"
        for found in NOT_FOUND.finditer(output):
            tool = next(group for group in found.groups() if group)
            if TOOLS.fullmatch(tool) and shutil.which(tool, path=PATH) is None:
                return f"the verifier needs a program: {_line(output, found)}"
        for found in NO_MODULE.finditer(output):
            if _is_the_tests_need(found.group(1), task_dir):
                return f"the verifier needs a package: {_line(output, found)}"
    return None


def _unreadable(task_dir: Path) -> str | None:
    """The script of a verifier whose interpreter is not found, for its name would end with CR."""
    for path in [task_dir / "tests/test.sh", *sorted(task_dir.glob("steps/*/tests/test.sh"))]:
        if path.is_file():
            with path.open("rb") as file:
                first = file.readline(READ_LIMIT)
            if first.startswith(b"#!") and first.endswith(b"\r\n"):
                return str(path.relative_to(task_dir))
    return None


def last_words(trial_dir: Path) -> str:
    """The last line that the verifier printed, if there is one."""
    for output in outputs(trial_dir):
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if lines:
            return lines[-1][:200]
    return ""


def outputs(trial_dir: Path) -> Iterator[str]:
    """What the verifier printed, the last step first."""
    steps = sorted(trial_dir.glob("steps/*"), key=lambda path: path.stat().st_mtime)
    for place in [trial_dir, *reversed(steps)]:
        path = place / "verifier" / OUTPUT
        if path.is_file() and not path.is_symlink():
            yield _tail(path)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - READ_LIMIT))
        return file.read(READ_LIMIT).decode(errors="replace")


def _line(output: str, found: re.Match[str]) -> str:
    """The line of a match, for a person."""
    start = output.rfind("\n", 0, found.start()) + 1
    end = output.find("\n", found.end())
    return output[start : end if end >= 0 else None].strip()[:200]


def _is_the_tests_need(module: str, task_dir: Path) -> bool:
    """Whether the tests import a module that the agent was not asked to write."""
    if module == "pytest":
        return True
    word = re.escape(module)
    imports = re.compile(rf"\b(?:import|from)\s+{word}\b")
    if not any(imports.search(text) for text in _texts(task_dir, "tests")):
        return False
    asked = list(_texts(task_dir, "solution"))
    asked += [_tail(path) for path in task_dir.rglob("instruction.md") if path.is_file()]
    mention = rf"\b{word}(?:\.py|\.so|/)" if module in PACKAGES else rf"\b{word}\b"
    return not any(re.search(mention, text) for text in asked)


def _texts(task_dir: Path, name: str) -> Iterator[str]:
    for root in [task_dir, *sorted(task_dir.glob("steps/*"))]:
        for path in sorted((root / name).rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield _tail(path)
