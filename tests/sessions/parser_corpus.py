"""Answers of models, well formed and malformed, and how they have to be read.

`corpus(family)` gives cases for each family that has a parser of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from notation_helpers import TOOLS

Call = tuple[str, dict[str, Any]]
UNKNOWN = "no_such_tool"
BASH = {"command": "ls -la"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"command": "ls -la | grep 'x y' && echo \"done\" > out.txt"},
    "unicode": {"command": "größer 日本語 🙂 \u00a0 مرحبا"},
    "lines": {"command": "cat <<EOF\n  a\n\tb\n\nEOF\n"},
    "escapes": {"command": "printf '\\n\\t\\\\' \\x41 \\u0041"},
    "looks like a number": {"command": "007"},
    "looks like true": {"command": "true"},
    "looks like null": {"command": "null"},
    "looks like an object": {"command": '{"a":1,  "b": [2]}'},
    "quoted": {"command": '"quoted"'},
    "single quotes": {"command": "'quoted'"},
    "empty text": {"command": ""},
    "numbers": {"command": "sleep", "timeout": 2.5, "lines": [1, -2, 3]},
    "a boolean": {"command": "x", "raw": True, "timeout": 0},
    "tags": {"command": "<b>x</b> <think> </think> & </tool"},
}
NESTED: dict[str, Any] = {
    "edit": {"old": "a\nb", "new": "", "deep": [{"x": [[], {}]}, {"y": None, "z": False}]},
    "maybe": None,
    "mode": "all",
}


@dataclass(frozen=True)
class Case:
    """An answer without its stop token and what it means.

    Where `malformed`, there is no call, and the content is all that follows the reasoning.
    """

    name: str
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    malformed: bool = False
    tools: Sequence[dict[str, Any]] = tuple(TOOLS)


def write_call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as the family's models write it."""
    body = json.dumps(arguments, ensure_ascii=False)
    if family in ("glm45", "glm47"):
        line = "\n" if family == "glm45" else ""
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            f"</arg_value>{line}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{line}{pairs}</tool_call>"
    if family == "deepseek-v3":
        return (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```"
            "<｜tool▁call▁end｜>"
        )
    if family == "llama3":
        named = json.dumps(name)
        return f'{{"name": {named}, "parameters": {body}}}'
    named = json.dumps(name)
    return f'<tool_call>\n{{"name": {named}, "arguments": {body}}}\n</tool_call>'


def write_calls(family: str, calls: Sequence[Call]) -> str:
    written = [write_call(family, *call) for call in calls]
    if family == "deepseek-v3":
        return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"
    separator = {"glm45": "\n", "glm47": "", "llama3": ";"}.get(family, "\n")
    return separator.join(written)


def corpus(family: str) -> list[Case]:
    """All cases of a family whose calls stand in its text; gpt-oss has its own."""
    if family == "gpt-oss":
        from parser_corpus_harmony import harmony_corpus

        return harmony_corpus()
    family = "llama3" if family.startswith("llama3") else family
    cases = [*_well_formed(family), *_malformed(family)]
    if family in ("qwen3", "qwen3-thinking", "glm45", "glm47"):
        cases += _thinking(family)
    if family in ("glm45", "glm47"):
        cases += _tags(family)
    opened = {"qwen3-thinking": "</think>\n\n", "glm47": "</think>"}.get(family, "")
    thought = [case for case in cases if case.name.startswith("thinks")]
    return [
        *thought,
        *(
            Case(c.name, opened + c.text, c.content, c.calls, c.reasoning, c.malformed, c.tools)
            for c in cases
            if c not in thought
        ),
    ]


def _well_formed(family: str) -> list[Case]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return write_calls(family, [(name, arguments)])

    cases = [
        Case(f"arguments: {name}", one("bash", arguments), "", (("bash", arguments),))
        for name, arguments in ARGUMENTS.items()
    ]
    nested = ("ersetze_datei", NESTED)
    cases += [
        Case("nested", one(*nested), "", (nested,)),
        Case("no arguments", one("now", {}), "", (("now", {}),)),
        Case("unknown tool", one(UNKNOWN, {"a": [1]}), "", ((UNKNOWN, {"a": [1]}),)),
        Case("no tools", one("bash", BASH), "", (("bash", BASH),), tools=()),
        Case("plain text", "Hello\n\n  world  ", "Hello\n\n  world  "),
        Case("empty", ""),
        Case("half a mark", "a <tool_ca", "a <tool_ca"),
    ]
    if not family.startswith("glm"):
        marked = {"command": "echo '<tool_call> </tool_call>'"}
        cases.append(Case("marks in JSON", one("bash", marked), "", (("bash", marked),)))
    pair: tuple[Call, ...] = (("bash", BASH), ("now", {}))
    cases.append(Case("parallel", write_calls(family, pair), "", pair))
    if family != "llama3":
        before = {"deepseek-v3": "I look.", "glm47": "I look."}.get(family, "I look.\n")
        mixed = (nested, ("bash", BASH))
        cases += [
            Case("text before", before + one("bash", BASH), "I look.", (("bash", BASH),)),
            Case(
                "text around",
                f"{before}{write_calls(family, mixed)}\nAnd on.",
                "I look.\nAnd on.",
                mixed,
            ),
        ]
    return cases


def _malformed(family: str) -> list[Case]:
    good = write_calls(family, [("bash", BASH)])
    two = write_calls(family, [("bash", BASH), ("now", {})])
    texts = {f"cut at {size}": good[:size] for size in range(12, len(good) - 1, 7)}
    texts["second cut"] = two[:-14]
    if family == "llama3":
        texts["bad JSON"] = '{"name": "bash", "parameters": {"command": ls}}'
        texts["text after"] = f"{good} and more"
    elif family not in ("glm45", "glm47"):
        texts["bad JSON"] = good.replace('"ls -la"', "ls -la")
        texts["single quotes"] = good.replace('"', "'")
        texts["not a number"] = good.replace('"ls -la"', "NaN")
        texts["arguments are a list"] = good.replace('{"command": "ls -la"}', "[1]")
        texts["one good, one bad"] = two.replace("{}", "{")
    if family.startswith(("qwen", "chatml", "glm")):
        texts["end alone"] = "so </tool_call> it is"
        texts["start alone"] = f"{good}\n<tool_call>"
        texts["empty call"] = "<tool_call>\n</tool_call>"
    if family == "deepseek-v3":
        texts["no end"] = good.removesuffix("<｜tool▁calls▁end｜>")
        texts["no fence"] = good.replace("```", "")
        texts["call alone"] = write_call(family, "bash", BASH)
        texts["other type"] = good.replace("function<", "tool<")
        texts["text between"] = two.replace("\n<｜tool▁call▁begin｜>", " or\n<｜tool▁call▁begin｜>")
        texts["two sections"] = good + good
        texts["empty section"] = "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"
    return [Case(f"malformed: {name}", text, text, malformed=True) for name, text in texts.items()]


def _tags(family: str) -> list[Case]:
    """Malformed calls of GLM, whose arguments stand between tags."""
    good = write_calls(family, [("bash", {"command": "a", "timeout": 3})])
    texts = {
        "nested marks": good.replace("a</arg_value>", "<tool_call>a</tool_call></arg_value>"),
        "no value end": good.replace("</arg_value>", "", 1),
        "no value": good.replace("<arg_value>a</arg_value>", ""),
        "no key end": good.replace("</arg_key>", "", 1),
        "text between": good.replace("<arg_key>timeout", "and <arg_key>timeout"),
        "same key": good.replace("timeout", "command"),
        "no name": good.replace("bash", ""),
        "name of two words": good.replace("bash", "bash it"),
        "JSON instead": '<tool_call>{"name": "bash", "arguments": {"command": "a"}}</tool_call>',
        "forgotten ends": "<tool_call>bash<arg_key>command</arg_key><arg_value>a</tool_call>"
        "<tool_call>bash<arg_key>command</arg_key><arg_value>b</arg_value></tool_call>",
    }
    cases = [Case(f"malformed: {n}", text, text, malformed=True) for n, text in texts.items()]
    raw = {"edit": "{'old': 'python'}", "maybe": "null", "either": "7", "any": "\\u0041 1,2"}
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in raw.items())
    read = {"edit": "{'old': 'python'}", "maybe": None, "either": 7, "any": "\\u0041 1,2"}
    text = f"<tool_call>ersetze_datei{pairs}</tool_call>"
    cases.append(Case("values that are no JSON", text, "", (("ersetze_datei", read),)))
    quoted = '<tool_call>bash<arg_key>timeout</arg_key><arg_value>"5"</arg_value></tool_call>'
    return [*cases, Case("a quoted number", quoted, "", (("bash", {"timeout": "5"}),))]


def _thinking(family: str) -> list[Case]:
    opened = family in ("glm47", "qwen3-thinking")
    call = write_calls(family, [("bash", BASH)])
    calls = (("bash", BASH),)
    gap = "\n" if family.startswith("qwen") else ""
    start = "" if opened else f"<think>{gap}"
    close = f"{gap}</think>{gap}{gap}"
    return [
        Case("thinks, answers", f"{start}I think.{close}Yes.", "Yes.", (), "I think."),
        Case("thinks, calls", f"{start}a\n\nb{close}{call}", "", calls, "a\n\nb"),
        Case("thinks nothing", f"{start}{close}Yes.", "Yes."),
        Case("thinks, cut off", f"{start}I thi", "", (), "I thi"),
        Case("thinks of a call", f"{start}I could {call}</think>No.", "No.", (), f"I could {call}"),
        Case("thinks of a call, cut off", f"{start}I could {call}", "", (), f"I could {call}"),
        Case("thinks, opens twice", f"<think>a</think>{call}", "", calls, "a"),
        Case("thinks, closes twice", f"{start}a</think>b</think>c", "b</think>c", (), "a"),
        Case("thinks, bad call", f"{start}a</think>{call[:-9]}", call[:-9], (), "a", True),
    ]  # fmt: skip
