"""What an agent did, as turns: from mini-swe-agent's own file or from Harbor's ATIF.

A turn is `{"role", "text", "reasoning"?, "calls": [{"name", "command", "output"?}], "time"?,
"tokens_in"?, "tokens_out"?, "finish_reason"?}`; `role` is system, user, assistant, tool or exit.
All texts are cleaned and bounded, and nothing of a file is taken for granted: agents write them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from miles_core.agent_server.dashboard.clean import Cleaner
from miles_core.agent_server.dashboard.files import Folder

FILES = ("trajectory.json", "mini-swe-agent.trajectory.json")
"""ATIF, which Harbor also makes from other agents' files, and mini-swe-agent's own."""

FILE_LIMIT = 8 << 20
MOST_TURNS = 400
"""Of a longer trajectory the last turns are given."""

Turn = dict[str, Any]


@dataclass(frozen=True)
class Live:
    """The conversation of an agent at work: `runs` counts its steps, `count` all messages of this
    one, and `messages` are the last of them."""

    runs: int
    count: int
    messages: list[dict[str, Any]]


def live_trajectory(live: Live, cleaner: Cleaner) -> dict[str, Any]:
    """What an agent at work has done so far, as `read_trajectory` has it from a file."""
    turns = _messages(live.messages, cleaner)
    first = live.count - len(live.messages)
    return {"format": "live", "turns": turns, "first": first, "problem": None}


def read_trajectory(folder: Folder, place: tuple[str, ...], cleaner: Cleaner) -> dict[str, Any]:
    """The trajectory in an agent's directory: `{"format", "turns", "first", "problem"}`.

    `first` is the number of turns before those that are given. `format` is None without a file.
    """
    problem = None
    for name in FILES:
        stamp = folder.stamp(*place, name)
        if stamp is None:
            continue
        data = folder.read(*place, name, limit=FILE_LIMIT, whole=True)
        if data is None:
            problem = f"{name} has {stamp[0]} bytes, more than the {FILE_LIMIT} that are shown"
            continue
        try:
            kind, turns = _turns(json.loads(data), cleaner)
        except (ValueError, RecursionError):
            problem = f"{name} is no trajectory that can be read"
            continue
        first = max(0, len(turns) - MOST_TURNS)
        return {"format": kind, "turns": turns[first:], "first": first, "problem": None}
    return {"format": None, "turns": [], "first": 0, "problem": problem}


def _turns(data: Any, cleaner: Cleaner) -> tuple[str, list[Turn]]:
    """Format and turns of a parsed file; raises ValueError when it is neither format."""
    if isinstance(data, dict) and isinstance(data.get("steps"), list):
        return "ATIF", [_atif(step, cleaner) for step in _objects(data["steps"])]
    if isinstance(data, dict) and isinstance(data.get("messages"), list):
        return "mini-swe-agent", _messages(data["messages"], cleaner)
    raise ValueError("neither steps nor messages")


def _atif(step: dict[str, Any], cleaner: Cleaner) -> Turn:
    role = {"agent": "assistant"}.get(str(step.get("source")), str(step.get("source")))
    turn = _turn(role, step.get("message"), cleaner)
    _put(turn, "reasoning", step.get("reasoning_content"), cleaner)
    calls = _objects(step.get("tool_calls"))
    for call in calls:
        turn["calls"].append(_call(call.get("function_name"), call.get("arguments"), cleaner))
    results = _objects(_object(step.get("observation")).get("results"))
    places = {str(call.get("tool_call_id")): n for n, call in enumerate(calls)}
    for result in results:
        place = places.get(str(result.get("source_call_id")), len(calls) - 1)
        if place < 0:
            turn["calls"].append({"name": None, "command": None})
            place = 0
        known = turn["calls"][place].get("output")
        output = cleaner.short(_text(result.get("content")))
        turn["calls"][place]["output"] = output if known is None else f"{known}\n{output}"
    metrics = _object(step.get("metrics"))
    _number(turn, "tokens_in", metrics.get("prompt_tokens"))
    _number(turn, "tokens_out", metrics.get("completion_tokens"))
    _number(turn, "time", _epoch(step.get("timestamp")))
    return turn


def _messages(messages: list[Any], cleaner: Cleaner) -> list[Turn]:
    """OpenAI's messages; the output of a tool belongs to the call that asked for it."""
    turns: list[Turn] = []
    waiting: dict[str, dict[str, Any]] = {}
    for message in _objects(messages):
        extra = _object(message.get("extra"))
        call = waiting.pop(str(message.get("tool_call_id")), None)
        if message.get("role") == "tool" and call is not None:
            call["output"] = cleaner.short(_text(message.get("content")))
            continue
        turn = _turn(str(message.get("role")), message.get("content"), cleaner)
        _put(turn, "reasoning", message.get("reasoning_content"), cleaner)
        for asked in _objects(message.get("tool_calls")):
            function = _object(asked.get("function"))
            made = _call(function.get("name"), function.get("arguments"), cleaner)
            turn["calls"].append(made)
            waiting[str(asked.get("id"))] = made
        _number(turn, "time", extra.get("timestamp"))
        if turn["role"] == "assistant":
            response = _object(extra.get("response"))
            usage = _object(response.get("usage"))
            _number(turn, "tokens_in", usage.get("prompt_tokens"))
            _number(turn, "tokens_out", usage.get("completion_tokens"))
            for choice in _objects(response.get("choices"))[:1]:
                _put(turn, "finish_reason", choice.get("finish_reason"), cleaner)
        turns.append(turn)
    return turns


def _turn(role: str, content: Any, cleaner: Cleaner) -> Turn:
    return {"role": cleaner.short(role, 40), "text": cleaner.short(_text(content)), "calls": []}


def _call(name: Any, arguments: Any, cleaner: Cleaner) -> dict[str, Any]:
    """A tool call; the command of a shell is shown as it is, other arguments as JSON."""
    given = arguments
    if isinstance(arguments, str):
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            given = arguments
    if isinstance(given, dict):
        for key in ("command", "keystrokes"):
            if isinstance(given.get(key), str):
                given = given[key]
                break
    command = given if isinstance(given, str) else json.dumps(cleaner.value(given))
    return {"name": cleaner.short(str(name or ""), 80), "command": cleaner.short(command)}


def _text(content: Any) -> str:
    """The text of a message, of which only the text parts are shown."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            known = _object(part)
            parts.append(str(known.get("text") or f"[{known.get('type')}]") if known else str(part))
        return "\n".join(parts)
    return json.dumps(content)


def _put(turn: Turn, key: str, value: Any, cleaner: Cleaner) -> None:
    if isinstance(value, str) and value:
        turn[key] = cleaner.short(value)


def _number(turn: Turn, key: str, value: Any) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15:
        turn[key] = value


def _epoch(value: Any) -> float | None:
    """Seconds since 1970 of an ISO 8601 time."""
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
