"""Harmony, the notation of gpt-oss: an answer is a sequence of messages with headers.

An answer begins behind `<|start|>assistant`. A header names a channel and, for a call, the tool:
` to=functions.NAME<|channel|>commentary json<|message|>` or, as the model itself mostly puts it,
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`. The channel `analysis` is
reasoning; `final`, and `commentary` that is no call, are content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from miles_core.sessions.messages import Message, ToolCall, clean_text
from miles_core.sessions.parsers.blocks import read_json, safe_length, skip_space

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
NEXT = f"{START}assistant"
_ENDS = (END, CALL, RETURN)
_MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_HEADER = re.compile(
    r"\s?(?:to=(?P<before>[^\s<>]+)\s?)?<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?: to=(?P<after>[^\s<>]+))?\s?(?:<\|constrain\|>)?(?P<kind>\w*)\s?"
)
_LONGEST_HEADER = 300


@dataclass(frozen=True)
class Part:
    """A message of an answer: what `text[start:end]` says. `closed`: a token follows its body.

    `channel` is "" for what is no message of this notation: `body` is then all that is left.
    """

    channel: str
    recipient: str
    body: str
    start: int
    end: int
    closed: bool


def split_parts(text: str) -> Iterator[Part]:
    """The messages of an answer, up to the first that is malformed, or whose header is not whole.

    Lazy: a caller that has seen enough stops.
    """
    at = 0
    while at < len(text) or not at:
        begin = at
        if at:
            if not text.startswith(NEXT, at):
                yield Part("", "", text[at:], at, len(text), False)
                return
            at += len(NEXT)
        open_end = text.find(MESSAGE, at, at + _LONGEST_HEADER)
        header = _HEADER.fullmatch(text, at, open_end) if open_end >= 0 else None
        body_start = open_end + len(MESSAGE)
        mark = _MARK.search(text, body_start) if header else None
        if header is None:
            yield Part("", "", text[begin:], begin, len(text), False)
            return
        body_end = mark.start() if mark else len(text)
        at = mark.end() if mark and mark[0] in _ENDS else body_end
        recipient = header["before"] or header["after"] or ""
        body = text[body_start:body_end]
        yield Part(header["channel"], recipient, body, begin, at, mark is not None)


def parse_call(part: Part) -> ToolCall | None:
    """The call of a message that has a recipient, or None when it is malformed."""
    name = part.recipient.removeprefix("functions.")
    if not part.body.strip():
        return ToolCall(name, {}) if name else None
    read = read_json(part.body, 0)
    if read is None or not isinstance(read[0], dict) or not name:
        return None
    whole = skip_space(part.body, read[1]) == len(part.body)
    return ToolCall(name, read[0]) if whole else None


ReadCall = Callable[[Part], ToolCall | None]


def parse_answer(text: str, read_call: ReadCall = parse_call) -> Message:
    """Reasoning, content and calls of an answer, the calls as `read_call` reads them.

    What is no message of this notation stays content, as it is and to the end of the answer; so do
    all calls, when one of them is malformed or anything malformed follows them.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    kept = (0, 0)  # how much of reasoning and content stands before the first call
    first = len(text)
    for part in split_parts(text):
        call = read_call(part) if part.recipient else None
        if part.channel == "" or (part.recipient and call is None):
            raw = text[min(first, part.start) :]
            if calls:
                reasoning, content = reasoning[: kept[0]], content[: kept[1]]
            return Message("assistant", _join([*content, raw]), (), _join(reasoning))
        if call is not None:
            if not calls:
                first, kept = part.start, (len(reasoning), len(content))
            calls.append(call)
        else:
            (reasoning if part.channel == "analysis" else content).append(part.body)
    return Message("assistant", _join(content), tuple(calls), _join(reasoning))


def settled_answer(text: str) -> tuple[str, str]:
    """Reasoning and content that nothing which follows `text` can change."""
    reasoning: list[str] = []
    content: list[str] = []
    for part in split_parts(text):
        if part.recipient:
            break
        if part.channel == "":
            if not _may_be_message(part.body, bool(part.start)):
                content.append(part.body)
            break
        body = part.body if part.closed else part.body[: _safe_body(part.body)]
        (reasoning if part.channel == "analysis" else content).append(body)
    return _join(reasoning), _join(content)


def _join(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)


def _safe_body(body: str) -> int:
    """How much of an unfinished body does not belong to what may yet become a token."""
    tail = max(len(body) - 16, 0)
    marks = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)
    return tail + min(safe_length(body[tail:], mark) for mark in marks)


def _may_be_message(text: str, later: bool) -> bool:
    """Whether `text`, which is no message yet, can become one by what follows."""
    if later:
        if not text.startswith(NEXT):
            return NEXT.startswith(text)
        text = text[len(NEXT) :]
    if MESSAGE in text[: _LONGEST_HEADER + len(MESSAGE)]:
        return False
    head = text.lstrip()
    return any(head[: len(mark)] == mark[: len(head)] for mark in ("to=", CHANNEL))


def render_answer(message: Message) -> str:
    """An answer as text, end token included.

    Only the last call ends with `<|call|>`, at which a model stops.
    """
    parts: list[str] = []
    if message.reasoning_content:
        parts.append(f"{CHANNEL}analysis{MESSAGE}{message.reasoning_content}")
    if not message.tool_calls:
        parts.append(f"{CHANNEL}final{MESSAGE}{message.content}")
    elif message.content:
        parts.append(f"{CHANNEL}commentary{MESSAGE}{message.content}")
    parts += [
        f" to=functions.{call.name}{CHANNEL}commentary json{MESSAGE}"
        f"{clean_text(call.arguments_json)}"
        for call in message.tool_calls
    ]
    return (END + NEXT).join(parts) + (CALL if message.tool_calls else RETURN)
