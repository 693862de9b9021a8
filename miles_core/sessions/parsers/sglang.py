"""SGLang's own parsers of reasoning and calls behind the interface of the built-in ones.

    parse = sglang_parser("glm47")          # None where SGLang is not installed
    message = parse(text, tools)

SGLang reads where reasoning ends and what is called with which arguments. Its parsers were made
for serving: what they cannot read they drop, and some of what they read nobody wrote. For training
an answer has to be what was sampled, so this module puts right what follows (seen in 0.5.23), and
the result is that of the built-in parsers. It decides where a call begins and ends, and gives
SGLang each one with the white space around its tags that it insists on.

| SGLang | here | reason |
|---|---|---|
| drops a call that is cut off or malformed (all notations) | the whole answer stays text | else the agent sees an empty answer and cannot say what was wrong |
| keeps the good calls beside a malformed one | the whole answer stays text | half of an answer is not what the model asked for |
| drops text after the calls (qwen25, glm45, deepseekv3) and comments before them (gpt-oss) | it is content | it was sampled |
| drops calls of unknown tools, and finds none without a list of tools | they are calls | the agent answers them with its own error, from which the model learns |
| reads NaN, and lists for arguments | malformed | no JSON object |
| qwen3, glm45: <think> anywhere begins reasoning, back to the start of the answer | only at the start | text before it is no reasoning, nor is a tag inside of arguments |
| qwen3, glm45: a call ends reasoning that is not closed | it is reasoning | a call that was only thought of is not made |
| qwen3, glm45: white space before <think> leaves the tag in the reasoning | it is taken off | GLM-4.5 writes a line break there |
| glm45: strings that look like JSON are written anew (`true` becomes `True`) | they stay | the command `true` is not `True` |
| glm47: quotes around a string are taken off | they stay | the notation has none, so they are the string's own |
| glm45, glm47: Python's literals, escaped JSON, quoted numbers are read | text, as written | nobody can know that this was meant |
| glm45, glm47: a forgotten tag makes a key, a value, or a call without arguments of what follows | malformed | the call would do something else |
| glm45, glm47: the same key twice | malformed | one value would be lost |
| deepseekv3: calls without the end of their section, text between calls | malformed | an answer that was cut off |
| gpt-oss: calls in the form of the chat template, calls without a type, and calls that do not follow `<|start|>assistant` are not found | they are calls | all are harmony, and that token is part of the prompt |
| gpt-oss: `fs.read` is the tool `read` | `fs.read` | only `functions.` is a namespace |
| gpt-oss: a call with `<|` in an argument is dropped | it is a call | no token, but text in JSON |
| gpt-oss: text without headers is dropped | it is content | it was sampled |
| gpt-oss: reasoning in several messages is put together without a break | a line break between | words would run together |

Of the arguments of GLM's calls, whose values have no quotes, SGLang gives the names; the values do
not go through it, but are read by this package's rule, from the tool's JSON schema. In gpt-oss the
headers say what is reasoning; SGLang reads the calls.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers import deepseek, glm, gptoss, hermes, llama3
from miles_core.sessions.parsers.blocks import read_json, skip_space
from miles_core.sessions.parsers.reasoning import END as THINK_END
from miles_core.sessions.parsers.reasoning import START as THINK
from miles_core.sessions.parsers.sglang_modules import SglangModules, load_sglang

_LOG = logging.getLogger(__name__)
Tools = Sequence[dict[str, Any]]
Parse = Callable[[str, Tools], Message]


@dataclass(frozen=True)
class Found:
    """Where the calls of an answer are: its content, and the calls as SGLang wants them written."""

    content: str
    names: list[str]
    text: str


@dataclass(frozen=True)
class Family:
    """SGLang's names of the parsers of a family; `find` gives None where there is no call."""

    calls: str
    find: Callable[[str], Found | None]
    reasoning: str = ""
    opened: bool = False


def _json_at(text: str, at: int) -> tuple[str, int]:
    """The JSON value at `text[at:]`, as it is written, and where it ends."""
    read = read_json(text, at)
    end = at if read is None else read[1]
    return text[skip_space(text, at) : end], end


def _find_hermes(text: str) -> Found | None:
    content, calls = hermes.parse_calls(text)
    blocks, at = [], 0
    for _ in calls:
        raw, at = _json_at(text, text.index(hermes.START, at) + len(hermes.START))
        blocks.append(f"{hermes.START}\n{raw}\n{hermes.END}")
    return Found(content, [call.name for call in calls], "\n".join(blocks)) if calls else None


def _find_llama3(text: str) -> Found | None:
    content, calls = llama3.parse_calls(text)
    at = text.find(llama3.MARK)
    at = at + len(llama3.MARK) if at >= 0 else 0
    objects = []
    for _ in calls:
        raw, end = _json_at(text, at)
        objects.append(raw)
        at = skip_space(text, end)
        at += text.startswith(";", at)
    names = [call.name for call in calls]
    return Found(content, names, llama3.MARK + ";".join(objects)) if calls else None


def _find_glm(text: str) -> Found | None:
    content, calls = glm.parse_calls(text)
    split = glm.split_blocks(text)
    if not calls or split is None:
        return None
    bodies = [body for raw in split[1] if (body := glm.split_body(raw)) is not None]
    blocks = [
        f"{glm.START}{name}"
        + "".join(f"{glm.KEY}{key}{glm.KEY_END}{glm.VALUE}0{glm.VALUE_END}" for key, _ in pairs)
        + glm.END
        for name, pairs in bodies
    ]
    return Found(content, [name for name, _ in bodies], "".join(blocks))


def _find_deepseek(text: str) -> Found | None:
    content, calls = deepseek.parse_calls(text)
    split = deepseek.split_calls(text)
    if not calls or split is None:
        return None
    blocks = []
    for call, body in zip(calls, split[1], strict=True):
        raw, _ = _json_at(body, body.index(deepseek.FENCE) + len(deepseek.FENCE))
        blocks.append(deepseek.write_call(call.name, raw))
    names = [call.name for call in calls]
    return Found(content, names, f"{deepseek.START}{chr(10).join(blocks)}{deepseek.END}")


_ALIAS = "called"
_CHATML = Family("qwen25", _find_hermes)
_FAMILIES = {
    "chatml": _CHATML,
    "smollm2": _CHATML,
    "qwen2.5": _CHATML,
    "qwen3-instruct": _CHATML,
    "qwen3": Family("qwen25", _find_hermes, "qwen3"),
    "qwen3-thinking": Family("qwen25", _find_hermes, "qwen3-thinking", opened=True),
    "glm45": Family("glm47", _find_glm, "glm45"),  # the tags are the same without line breaks
    "glm47": Family("glm47", _find_glm, "glm45", opened=True),
    "llama3": Family("llama3", _find_llama3),
    "llama3.2": Family("llama3", _find_llama3),
    "deepseek-v3": Family("deepseekv3", _find_deepseek),
}


def sglang_parser(family: str) -> Parse | None:
    """The parser of answers of a chat family that uses SGLang's parsers.

    None where SGLang is not installed, or has none for this family. What it returns takes the text
    of an answer without its stop token and the request's tools, and never raises.
    """
    if family != "gpt-oss" and family not in _FAMILIES:
        return None
    modules = load_sglang()
    if modules is None:
        return None
    if family == "gpt-oss":
        return partial(_parse_harmony, modules)
    return partial(_parse, modules, _FAMILIES[family])


def _parse(modules: SglangModules, family: Family, text: str, tools: Tools = ()) -> Message:
    reasoning, rest = _split_reasoning(modules, family, text)
    found = family.find(rest)
    if found is None:
        return Message("assistant", rest, (), reasoning)
    read = _read_calls(modules, family.calls, found.names, found.text, tools)
    if read is None:
        return Message("assistant", rest, (), reasoning)
    if family.find is _find_glm:
        read = _with_own_values(read, rest, tools)
    return Message("assistant", found.content, read, reasoning)


def _split_reasoning(modules: SglangModules, family: Family, text: str) -> tuple[str, str]:
    """Reasoning, which can only stand at the start, and the rest."""
    begun = text.lstrip().startswith(THINK)
    if not family.reasoning or not (begun or family.opened):
        return "", text
    whole = text.lstrip() if begun else text
    if THINK_END not in whole:
        whole += THINK_END
    reasoning, rest = modules.reasoning(family.reasoning, whole, family.opened)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _read_calls(
    modules: SglangModules, parser: str, names: Sequence[str], text: str, tools: Tools
) -> tuple[ToolCall, ...] | None:
    """The calls that SGLang reads in `text`; None unless these are calls of all `names`."""
    try:
        read = modules.calls(parser, _known(names, tools), text)
        arguments = [json.loads(call.parameters) for call in read]
    except (ValueError, RecursionError) as error:
        _LOG.warning("SGLang's parser %s refuses a call: %s", parser, error)
        return None
    if [call.name for call in read] != list(names):
        return None
    if not all(isinstance(given, dict) for given in arguments):
        return None
    return tuple(ToolCall(*pair) for pair in zip(names, arguments, strict=True))


def _known(names: Sequence[str], tools: Tools) -> list[dict[str, Any]]:
    """A definition of each tool that is called, for SGLang to know it; the request's, if any."""
    schemas: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            schemas.setdefault(str(function.get("name")), function["parameters"])
    return [
        {"type": "function", "function": {"name": name, "parameters": schemas.get(name)}}
        for name in dict.fromkeys(names)
    ]


def _with_own_values(calls: Sequence[ToolCall], text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """GLM's calls with values by the rule of this package, in the order that SGLang gives."""
    own = glm.parse_calls(text, tools)[1]
    return tuple(
        ToolCall(call.name, {key: mine.arguments[key] for key in call.arguments})
        for call, mine in zip(calls, own, strict=True)
    )


def _parse_harmony(modules: SglangModules, text: str, tools: Tools = ()) -> Message:
    return gptoss.parse_answer(text, partial(_harmony_call, modules))


def _harmony_call(modules: SglangModules, part: gptoss.Part) -> ToolCall | None:
    """A call of gpt-oss; SGLang gets it under a name that it does not cut."""
    own = gptoss.parse_call(part)
    if own is None:
        return None
    header = f"{gptoss.NEXT}{gptoss.CHANNEL}commentary to=functions.{_ALIAS}<|constrain|>json"
    body = part.body.replace("<|", "\\u003c|")  # in JSON the same; only a string can hold it
    text = f"{header}{gptoss.MESSAGE}{body}{gptoss.CALL}"
    read = _read_calls(modules, "gpt-oss", [_ALIAS], text, ())
    return None if read is None else ToolCall(own.name, read[0].arguments)
