"""The row format: a prompt and metadata with the id of a task; looking up and checking both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from miles_core.errors import UserError

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_ID_LENGTH = 200
DEFAULT_AGENT = "mini-swe-agent"
DEFAULT_SPLIT = "train"
PROMPT_KEYS = ("problem_statement", "instruction", "prompt")
ID_KEYS = ("instance_id", "metadata.instance_id", "task_id", "id", "name")

_ID_SEPARATOR = re.compile(r"::|/")
_PATH_STEPS = frozenset({"", ".", ".."})  # an absolute or relative path names no task
_MISSING = object()


class DataError(UserError):
    """Rows that cannot be used; the message says which, where and why."""


class BadRow(ValueError):
    """One row cannot be used; the message is the reason, `hint` what might help all such rows."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True)
class Row:
    """One line of the prompt data.

    `prompt` is text or a list of chat messages; `metadata` holds every original field; `index` is
    the position in the file, from 0.
    """

    prompt: str | list[dict[str, Any]]
    instance_id: str
    agent_name: str
    metadata: dict[str, Any]
    index: int


def lookup(value: Any, path: str) -> Any:
    """The value at a dotted path; raises KeyError when there is none.

    A step is a key of an object or an index of a list. A key that itself contains dots is found
    first.
    """
    found = _lookup(value, path.split("."))
    if found is _MISSING:
        raise KeyError(path)
    return found


def _lookup(value: Any, parts: list[str]) -> Any:
    if not parts:
        return value
    if isinstance(value, dict):
        for end in range(len(parts), 0, -1):
            key = ".".join(parts[:end])
            if key in value:
                found = _lookup(value[key], parts[end:])
                if found is not _MISSING:
                    return found
    elif isinstance(value, list) and re.fullmatch(r"-?\d{1,9}", parts[0]):
        index = int(parts[0])
        if -len(value) <= index < len(value):
            return _lookup(value[index], parts[1:])
    return _MISSING


def find_value(row: dict[str, Any], key: str | None, usual: tuple[str, ...], flag: str) -> Any:
    """The value at `key`, or at the first of the usual keys that the row has; BadRow if none."""
    for path in (key,) if key else usual:
        found = row[path] if path in row else _lookup(row, path.split("."))
        if found is not _MISSING and (key or found is not None):
            return found
    wanted = repr(key) if key else f"any of {', '.join(usual)}"
    raise BadRow(f"has nothing at {wanted}", f"set {flag} to one of: {', '.join(_paths(row))}")


def _paths(row: dict[str, Any], limit: int = 16) -> list[str]:
    """Dotted paths of a row, two levels below the top at most."""
    paths: list[str] = []

    def walk(value: dict[str, Any], prefix: str, depth: int) -> None:
        for key, inner in value.items():
            if isinstance(inner, dict) and inner and depth < 2:
                walk(inner, f"{prefix}{key}.", depth + 1)
            else:
                paths.append(f"{prefix}{key}")

    walk(row, "", 0)
    return paths[:limit] + (["..."] if len(paths) > limit else [])


def check_prompt(prompt: Any) -> None:
    """Raise BadRow unless the prompt is non-blank text or chat messages with some content."""
    if isinstance(prompt, str):
        if not prompt or prompt.isspace():
            raise BadRow("the prompt is empty")
        return
    if not isinstance(prompt, list):
        raise BadRow(f"the prompt is {_kind(prompt)}, not text or a list of messages")
    some = False
    for index, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {index} of the prompt is not an object with a role")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise BadRow(f"the content of message {index} is {_kind(content)}, not text")
        some = some or bool(content.strip() if isinstance(content, str) else content)
    if not some:
        raise BadRow("the prompt is empty")


def task_id(source: Any) -> str:
    """The id of a task directory for the id of a source row.

    An id that can name a directory is kept. Of one with a namespace (`terminal_bench::fix-git`,
    `suite/fix-git`) the last part is taken. Everything else is a BadRow.
    """
    if isinstance(source, int) and not isinstance(source, bool):
        source = str(source)
    if not isinstance(source, str):
        raise BadRow(f"the id is {_kind(source)}, not text")
    if not source:
        raise BadRow("the id is empty")
    if valid_id(source):
        return source
    parts = _ID_SEPARATOR.split(source)
    name = parts[-1]
    if not valid_id(name) or not _PATH_STEPS.isdisjoint(parts):
        raise BadRow(
            f"the id {source[:80]!r} cannot name a task directory: letters, digits, '.', '_' and "
            f"'-' only, a letter or digit first, {MAX_ID_LENGTH} characters at most"
        )
    return name


def valid_id(name: str) -> bool:
    """Whether an id can name a task directory."""
    return len(name) <= MAX_ID_LENGTH and ID_PATTERN.fullmatch(name) is not None


def is_row(value: dict[str, Any]) -> bool:
    """Whether an object has the shape of a row: a prompt, and metadata with an instance id."""
    metadata = value.get("metadata")
    return "prompt" in value and isinstance(metadata, dict) and "instance_id" in metadata


def parse_row(value: Any, index: int, default_agent: str = DEFAULT_AGENT) -> Row:
    """A checked Row from a decoded line; raises BadRow."""
    if not isinstance(value, dict):
        raise BadRow(f"is {_kind(value)}, not an object")
    if not is_row(value):
        raise BadRow("needs 'prompt' and 'metadata.instance_id'; run `miles data convert` first")
    metadata = value["metadata"]
    check_prompt(value["prompt"])
    instance_id = metadata["instance_id"]
    if not isinstance(instance_id, str) or not valid_id(instance_id):
        raise BadRow(f"metadata.instance_id {instance_id!r} cannot name a task directory")
    agent = metadata.get("agent_name") or default_agent
    if not isinstance(agent, str):
        raise BadRow(f"metadata.agent_name is {_kind(agent)}, not text")
    return Row(value["prompt"], instance_id, agent, metadata, index)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
