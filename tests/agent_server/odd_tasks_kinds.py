"""What an odd task is made of, for the modules that list them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from task_directories import DOCKERFILE as DOCKERFILE
from task_directories import TOML

from miles_core.verdicts import Cause

OLD = 'version = "1.0"\n'
BASH = "#!/bin/bash\n"
PASSED = '[ "$(cat /app/answer.txt 2>/dev/null)" = "42" ]'

Ending = float | Cause
Files = Mapping[str, str | bytes | None]

SOLVED: tuple[Ending, Ending] = (1.0, 0.0)


def both(ending: Ending) -> tuple[Ending, Ending]:
    """The same end for `oracle` and `nop`."""
    return ending, ending


INVALID = both(Cause.TASK_INVALID)
UNSUPPORTED = both(Cause.SANDBOX_UNSUPPORTED)
NO_REWARD = both(Cause.REWARD_MISSING)
BAD_REWARD = both(Cause.REWARD_INVALID)


@dataclass(frozen=True)
class Odd:
    """One odd task: the default task of the tests with other files.

    `ends` is what `oracle` and `nop` end in. A value of `files` is text, bytes, or None for a
    file that is not there; `arrange` then changes what cannot be written so. The default suite
    runs the `quick` ones.
    """

    ends: tuple[Ending, Ending]
    why: str
    files: Files = field(default_factory=dict)
    arrange: Callable[[Path], None] | None = None
    quick: bool = False


def toml(more: str = "", **replaced: str) -> str:
    """The task.toml of the default task, with lines added to `[environment]` and to tables."""
    text = TOML.replace("{agent_s}", "60").replace("{verifier_s}", "30")
    for table, line in replaced.items():
        text = text.replace(f"[{table}]\n", f"[{table}]\n{line}\n")
    return text + more


def graded(passed: str = PASSED, before: str = "", after: str = "") -> str:
    """A test.sh that grades by the condition `passed`."""
    return (
        f"{BASH}{before}\nif {passed}; then r=1; else r=0; fi\n"
        f"echo $r > /logs/verifier/reward.txt\n{after}\n"
    )
