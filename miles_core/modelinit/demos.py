"""Demonstrations: the tasks' own solutions, with fresh names, as the session server renders them.

A task that names the words it is about (`[metadata] names` in `task.toml`) and whose
`solution/solve.sh` is one command gives a pattern: its instruction and its command with these words
left open. A demonstration fills a pattern with made-up words, so it never shows an existing task.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from miles_core.errors import UserError
from miles_core.sessions.families import ChatFamily

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_SLIP_SHARE = 0.2
# What shells and programs say when a command fails: return code and output.
_COMPLAINTS = [
    (0, ""),
    (1, "{program}: cannot stat '{name}': No such file or directory\n"),
    (2, "{program}: cannot read: {name}: No such file or directory\n"),
    (2, "/bin/sh: 1: cannot open {name}: No such file\n"),
    (127, "/bin/sh: 1: {program}: not found\n"),
    (
        1,
        "{program}: missing destination file operand after '{name}'\n"
        "Try '{program} --help' for more information.\n",
    ),
]


@dataclass(frozen=True)
class Pattern:
    """An instruction and its command; `{0}`, `{1}`, ... stand for names."""

    instruction: str
    command: str
    names: int


@dataclass(frozen=True)
class Prompts:
    """What the agent says: the texts of its configuration, as it renders them."""

    system: str
    instance: jinja2.Template
    observation: jinja2.Template

    @classmethod
    def load(cls, path: Path) -> Prompts:
        """The templates of a mini-swe-agent configuration (YAML)."""
        import yaml

        config = yaml.safe_load(path.read_text("utf-8"))
        agent, model = config["agent"], config["model"]
        return cls(
            _template(agent["system_template"]).render(),
            _template(agent["instance_template"]),
            _template(model["observation_template"]),
        )

    def opening(self, instruction: str) -> list[dict[str, Any]]:
        """The messages of the first model call."""
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.instance.render(task=instruction)},
        ]

    def observed(self, returncode: int, output: str) -> dict[str, Any]:
        """The message that tells what a command did."""
        text = self.observation.render(
            output={"returncode": returncode, "output": output, "exception_info": ""}
        )
        return {"role": "tool", "tool_call_id": "call_0", "content": text}


def _template(source: str) -> jinja2.Template:
    return jinja2.Template(source, undefined=jinja2.StrictUndefined)


@dataclass(frozen=True)
class Demo:
    """One demonstration; `loss_mask` is 1 on the tokens that the policy has to say."""

    tokens: list[int]
    loss_mask: list[int]


def bash_call(command: str) -> dict[str, Any]:
    """The assistant's message that runs a command."""
    call = {"name": "bash", "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}


def called_command(message: dict[str, Any]) -> str | None:
    """The command of an answer that is one call of bash and nothing else, else None."""
    calls = message.get("tool_calls") or []
    if len(calls) != 1 or message.get("content") or calls[0]["function"]["name"] != "bash":
        return None
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
    except ValueError:
        return None
    if not isinstance(arguments, dict) or set(arguments) != {"command"}:
        return None
    return arguments["command"] if isinstance(arguments["command"], str) else None


def read_patterns(tasks_dir: Path) -> tuple[list[Pattern], set[str]]:
    """The distinct patterns of a tasks directory, sorted, and every name that its tasks use."""
    patterns, names = set(), set()
    for file in sorted(tasks_dir.glob("*/task.toml")):
        words = tomllib.loads(file.read_text("utf-8")).get("metadata", {}).get("names", [])
        solution = file.parent / "solution" / "solve.sh"
        if not words or not solution.is_file():
            continue
        names.update(words)
        lines = [line.strip() for line in solution.read_text("utf-8").splitlines()]
        commands = [line for line in lines if line and not line.startswith("#")]
        if len(commands) != 1:
            raise UserError(
                f"{solution} holds {len(commands)} commands; a demonstration shows one",
                "Leave `names` out of that task's metadata, or make its solution one command.",
            )
        instruction = (file.parent / "instruction.md").read_text("utf-8")
        patterns.add(Pattern(_opened(instruction, words), _opened(commands[0], words), len(words)))
    if not patterns:
        raise UserError(
            f"no task of {tasks_dir} can be demonstrated",
            "A task needs `names` in [metadata] of task.toml and a solution/solve.sh.",
        )
    return sorted(patterns, key=lambda p: (p.command, p.instruction)), names


def _opened(text: str, words: Sequence[str]) -> str:
    text = text.replace("{", "{{").replace("}", "}}")
    for place, word in enumerate(words):
        text = re.sub(rf"\b{re.escape(word)}\b", f"{{{place}}}", text)
    return text


def fixed_words(patterns: Sequence[Pattern]) -> list[str]:
    """The words of the patterns' fixed parts, in a fixed order."""
    return words_of(" ".join(f"{p.instruction} {p.command}" for p in patterns))


def words_of(text: str) -> list[str]:
    """The words of a text with two letters or more, sorted."""
    return sorted(set(re.findall(r"[A-Za-z]{2,}", text)))


def word_maker(rng: random.Random, taken: set[str]) -> Callable[[], str]:
    """Makes words of two syllables, such as "mofe", that are not in `taken`."""

    def make() -> str:
        while True:
            word = "".join(rng.choice(letters) for letters in (_CONSONANTS, _VOWELS) * 2)
            if word not in taken:
                return word

    return make


def fill(pattern: Pattern, word: Callable[[], str]) -> tuple[str, str]:
    """An instruction and its command with fresh names."""
    names = [word() for _ in range(pattern.names)]
    return pattern.instruction.format(*names), pattern.command.format(*names)


class DemoMaker:
    """Draws demonstrations; the same seed draws the same ones.

    Some show a slip: a command that misses the goal and mostly fails. It is not learned from; the
    submission that follows it is, so that the policy ends also after an error that it has seen.
    """

    def __init__(
        self,
        family: ChatFamily,
        prompts: Prompts,
        patterns: Sequence[Pattern],
        taken: set[str],
        seed: int,
    ) -> None:
        self.family, self.prompts, self.patterns = family, prompts, list(patterns)
        self._rng = random.Random(seed)
        self._word = word_maker(self._rng, taken | set(fixed_words(patterns)))

    def goal(self) -> tuple[str, str]:
        """An instruction and the command that does it."""
        return fill(self._rng.choice(self.patterns), self._word)

    def demo(self) -> Demo:
        """A demonstration of both turns."""
        instruction, command = self.goal()
        if self._rng.random() >= _SLIP_SHARE:
            return self.render(instruction, command, self.prompts.observed(0, ""), learn=True)
        wrong = self.goal()[1]
        returncode, said = self._rng.choice(_COMPLAINTS)
        said = said.format(program=wrong.split()[0], name=f"{self._word()}.txt")
        seen = self.prompts.observed(returncode, said)
        return self.render(instruction, wrong, seen, learn=False)

    def render(self, instruction: str, command: str, seen: dict[str, Any], learn: bool) -> Demo:
        """The ids of a whole conversation; `learn`: whether the first command is learned."""
        opening = self.prompts.opening(instruction)
        answer = bash_call(command)
        answered = self.family.render_output(answer)
        parts = [
            (self.family.render_prompt(opening), 0),
            (answered, int(learn)),
            (self.family.continue_turn([*opening, answer], answered, [seen]), 0),
            (self.family.render_output(bash_call(SUBMIT)), 1),
        ]
        tokens = [token for ids, _ in parts for token in ids]
        return Demo(tokens, [mask for ids, mask in parts for _ in ids])
