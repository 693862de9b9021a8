"""Generate the example tasks: one shell command each, in ten families, with made-up names.

    python examples/generate_tasks.py            # writes examples/tasks and examples/rows
    python examples/generate_tasks.py --output D # writes D/tasks and D/rows

The output depends on nothing but `SEED` and the tables below. `rows/train.jsonl` and
`rows/heldout.jsonl` share no name: success on the second shows what was learned beyond the first.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SEED = 20
TRAIN_PER_FAMILY = 5
HELDOUT_PER_FAMILY = 2
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"

TASK_TOML = """\
schema_version = "1.4"

[metadata]
difficulty = "easy"
family = "{family}"
names = {names}

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 512
storage_mb = 64
workdir = "/app"
network_mode = "no-network"
"""

TEST_SH = """\
#!/bin/sh
# Reward 1 for exactly the result that was asked for, else 0.
same() {{ # PATH TEXT: PATH is a regular file that holds TEXT and nothing else
  [ -f "$1" ] && [ ! -L "$1" ] && [ "$(cat "$1"; echo .)" = "$(printf "$2"; echo .)" ]
}}
reward=0
if {check}; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
"""


@dataclass
class Goal:
    """What one task asks for, with its names filled in."""

    instruction: str
    command: str
    check: list[str]
    files: dict[str, str] = field(default_factory=dict)


Words = Callable[[], str]


def _same(path: str, text: str) -> str:
    return f"same /app/{path} '{text}'".replace("\n", "\\n")


def _absent(path: str) -> str:
    return f"[ ! -e /app/{path} ]"


def _lines(word: Words, count: int) -> str:
    return "".join(f"{word()}\n" for _ in range(count))


def write(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    return Goal(f"Write {a} to {b}.txt", f"echo {a} > {b}.txt", [_same(f"{b}.txt", f"{a}\n")])


def append(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    old = _lines(word, 1)
    return Goal(
        f"Append {a} to {b}.txt",
        f"echo {a} >> {b}.txt",
        [_same(f"{b}.txt", f"{old}{a}\n")],
        {f"{b}.txt": old},
    )


def folder(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    return Goal(f"Make folder {a}", f"mkdir {a}", [f"[ -d /app/{a} ]", f"[ ! -L /app/{a} ]"])


def empty(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    return Goal(f"Create empty {a}.txt", f"touch {a}.txt", [_same(f"{a}.txt", "")])


def copy(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    text = _lines(word, 2)
    return Goal(
        f"Copy {a}.txt to {b}.txt",
        f"cp {a}.txt {b}.txt",
        [_same(f"{a}.txt", text), _same(f"{b}.txt", text)],
        {f"{a}.txt": text},
    )


def rename(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    text = _lines(word, 2)
    return Goal(
        f"Rename {a}.txt to {b}.txt",
        f"mv {a}.txt {b}.txt",
        [_absent(f"{a}.txt"), _same(f"{b}.txt", text)],
        {f"{a}.txt": text},
    )


def count(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    lines = rng.randint(2, 9)
    return Goal(
        f"Count lines of {a}.txt into {b}.txt",
        f"wc -l < {a}.txt > {b}.txt",
        [_same(f"{b}.txt", f"{lines}\n")],
        {f"{a}.txt": _lines(word, lines)},
    )


def sort(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    lines = [word() for _ in range(4)]
    while lines == sorted(lines):
        rng.shuffle(lines)
    return Goal(
        f"Sort {a}.txt into {b}.txt",
        f"sort {a}.txt > {b}.txt",
        [_same(f"{b}.txt", "".join(f"{line}\n" for line in sorted(lines)))],
        {f"{a}.txt": "".join(f"{line}\n" for line in lines)},
    )


def first(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    text = _lines(word, 3)
    return Goal(
        f"Put first line of {a}.txt into {b}.txt",
        f"head -n 1 {a}.txt > {b}.txt",
        [_same(f"{b}.txt", text.splitlines(keepends=True)[0])],
        {f"{a}.txt": text},
    )


def remove(a: str, b: str, rng: random.Random, word: Words) -> Goal:
    kept = _lines(word, 1)
    return Goal(
        f"Remove {a}.txt",
        f"rm {a}.txt",
        [_absent(f"{a}.txt"), _same(f"{b}.txt", kept)],
        {f"{a}.txt": _lines(word, 1), f"{b}.txt": kept},
    )


FAMILIES = [write, append, folder, empty, copy, rename, count, sort, first, remove]


def make_word(rng: random.Random) -> str:
    """A made-up word of two syllables, such as "mofe"."""
    return "".join(rng.choice(letters) for letters in (CONSONANTS, VOWELS) * 2)


def write_task(directory: Path, family: str, names: list[str], goal: Goal) -> None:
    """Write one Harbor task directory (schema 1.4)."""
    shutil.rmtree(directory, ignore_errors=True)
    files = {
        "task.toml": TASK_TOML.format(family=family, names=json.dumps(names)),
        # No newline at the end: the instruction is the whole prompt, and is used as it stands.
        "instruction.md": goal.instruction,
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n"
        + "".join(f"COPY {name} /app/{name}\n" for name in goal.files),
        "tests/test.sh": TEST_SH.format(check=" && ".join(goal.check)),
        "solution/solve.sh": f"#!/bin/sh\n{goal.command}\n",
        **{f"environment/{name}": text for name, text in goal.files.items()},
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)


def generate(output: Path) -> dict[str, list[str]]:
    """Write `output/tasks` and `output/rows`; returns the task ids by split."""
    rng = random.Random(SEED)
    used: set[str] = set()

    def word() -> str:
        while (made := make_word(rng)) in used:
            continue
        used.add(made)
        return made

    rows: dict[str, list[dict[str, object]]] = {"train": [], "heldout": []}
    for make in FAMILIES:
        for number in range(1, TRAIN_PER_FAMILY + HELDOUT_PER_FAMILY + 1):
            split = "train" if number <= TRAIN_PER_FAMILY else "heldout"
            task_id = f"{make.__name__}-{number:03d}"
            a, b = word(), word()
            goal = make(a, b, rng, word)
            names = [name for name in (a, b) if name in goal.instruction]
            write_task(output / "tasks" / task_id, make.__name__, names, goal)
            metadata = {
                "instance_id": task_id,
                "agent_name": "mini-swe-agent",
                "split": split,
                "family": make.__name__,
            }
            rows[split].append({"prompt": goal.instruction, "metadata": metadata})
    (output / "rows").mkdir(parents=True, exist_ok=True)
    for split, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (output / "rows" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return {
        split: [str(line["metadata"]["instance_id"]) for line in lines]  # type: ignore[index]
        for split, lines in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).resolve().parent,
        help="folder that gets tasks/ and rows/ (default: the folder of this script)",
    )
    ids = generate(parser.parse_args().output)
    print(", ".join(f"{len(found)} {split} tasks" for split, found in ids.items()))


if __name__ == "__main__":
    main()
