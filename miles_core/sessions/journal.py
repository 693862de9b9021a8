"""A session on disk: one file to which each turn is appended as it is recorded.

The file holds all that the session's tree holds, so that a session can leave memory, and outlives
the process that served it. It is a sequence of frames: the lengths of the head and of all that
follows, a checksum of it all, a head in JSON, and arrays as they are in memory. A frame that was
cut off by a death is the end of the file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.protocol import EndReason, SessionRequest
from miles_core.sessions.tree import Tree, Turn

log = logging.getLogger("miles.sessions")

SUFFIX = ".session"
_LENGTHS = struct.Struct("<II")
_CHECKSUM = struct.Struct("<I")
_ARRAYS = (("prompt_ids", "i4"), ("output_ids", "i4"), ("logprobs", "f8"))


@dataclass
class Stored:
    """A session as its file has it."""

    request: SessionRequest
    tree: Tree
    end_reason: EndReason | None = None
    damaged: bool = False


class Damaged(Exception):
    """A frame is whole, but not as it was written."""


@dataclass(frozen=True)
class Journal:
    """The file of one session. Raises OSError when the disk does."""

    path: Path

    def create(self, request: SessionRequest) -> None:
        """Begin the file, which only its owner can read. The session's secret is not in it."""
        head = {"request": request.model_dump(mode="json")}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_pack(head, b""))

    def append(self, turn: Turn, experts: bytes = b"") -> tuple[int, int] | None:
        """Write a turn; returns where its `experts` are. A failed write leaves nothing."""
        arrays = [np.ascontiguousarray(getattr(turn, name), kind) for name, kind in _ARRAYS]
        lengths = [len(array) for array in arrays]
        head = {"turn": _head(turn), "lengths": lengths, "experts": len(experts)}
        end = self._write(head, b"".join([*(array.tobytes() for array in arrays), experts]))
        return (end - len(experts), len(experts)) if experts else None

    def end(self, reason: EndReason | None) -> None:
        """Write why the session refused a call, or that it goes on."""
        self._write({"end_reason": reason}, b"")

    def unseen(self, turn: Turn) -> None:
        """Write that the client of a turn had gone away."""
        self._write({"unseen": turn.index}, b"")

    def _write(self, head: dict[str, Any], body: bytes) -> int:
        """Append a frame; returns the length of the file."""
        frame = _pack(head, body)
        with self.path.open("r+b", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                if file.write(frame) != len(frame):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(start)
                raise
        return start + len(frame)

    def read(self) -> Stored:
        """All that was written, or up to a damage, after which the session counts as failed.

        Raises ValueError for a file that begins with no session.
        """
        frames = self._frames()
        try:
            _, first, _ = next(frames, (0, {}, b""))
        except Damaged as error:
            raise ValueError(f"{self.path} is damaged") from error
        if "request" not in first:
            raise ValueError(f"{self.path} is no session")
        stored = Stored(SessionRequest.model_validate(first["request"]), Tree())
        try:
            for start, head, body in frames:
                _take(stored, start, head, body)
        except Damaged:
            log.error("%s is damaged after %d turns", self.path, len(stored.tree.turns))
            stored.damaged, stored.end_reason = True, "session_failed"
        return stored

    def _frames(self) -> Iterator[tuple[int, dict[str, Any], bytes]]:
        """Of each whole frame: where its body starts in the file, its head, its body."""
        with self.path.open("rb") as file:
            while len(lengths := file.read(_LENGTHS.size)) == _LENGTHS.size:
                checksum = file.read(_CHECKSUM.size)
                head_length, length = _LENGTHS.unpack(lengths)
                content = file.read(length)
                if len(content) != length:
                    return
                if _checksum(lengths, content) != checksum:
                    raise Damaged
                body = content[head_length:]
                yield file.tell() - len(body), json.loads(content[:head_length]), body

    def blob(self, place: tuple[int, int]) -> bytes:
        """The bytes at a place that `append` returned."""
        with self.path.open("rb") as file:
            file.seek(place[0])
            return file.read(place[1])

    def remove(self) -> None:
        """Delete the file; one that is gone is no error."""
        self.path.unlink(missing_ok=True)


def _take(stored: Stored, start: int, head: dict[str, Any], body: bytes) -> None:
    if "turn" in head:
        stored.tree.add(_turn(stored.tree, head, body, start))
    elif "unseen" in head:
        stored.tree.turns[head["unseen"]].unseen = True
    else:
        stored.end_reason = head["end_reason"]


def _pack(head: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(head).encode()
    content = text + body
    lengths = _LENGTHS.pack(len(text), len(content))
    return lengths + _checksum(lengths, content) + content


def _checksum(lengths: bytes, content: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(lengths)))


def _head(turn: Turn) -> dict[str, Any]:
    return {
        "parent": None if turn.parent is None else turn.parent.index,
        "tools_key": turn.tools_key,
        "new": [_message_fields(message) for message in turn.new],
        "answer": _message_fields(turn.answer),
        "rid": turn.rid,
        "versions": turn.versions,
        "finish_reason": turn.finish_reason,
        "started": turn.started,
        "ended": turn.ended,
    }


def _message_fields(message: Message) -> list[Any]:
    calls = [[call.name, call.arguments, call.id] for call in message.tool_calls]
    return [message.role, message.content, calls, message.reasoning_content,
            message.tool_call_id, message.name]  # fmt: skip


def _message(fields: list[Any]) -> Message:
    role, content, calls, *rest = fields
    return Message(role, content, tuple(ToolCall(*call) for call in calls), *rest)


def _turn(tree: Tree, head: dict[str, Any], body: bytes, start: int) -> Turn:
    values = head["turn"]
    arrays, at = [], 0
    for (_, kind), length in zip(_ARRAYS, head["lengths"], strict=True):
        arrays.append(np.frombuffer(body, kind, length, at).copy())
        at += arrays[-1].nbytes
    parent = None if values["parent"] is None else tree.turns[values["parent"]]
    prompt_ids, output_ids, logprobs = arrays
    return Turn(
        index=len(tree.turns),
        parent=parent,
        tools_key=values["tools_key"],
        new=tuple(_message(fields) for fields in values["new"]),
        answer=_message(values["answer"]),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=logprobs,
        length=(parent.length if parent else 0) + len(prompt_ids) + len(output_ids),
        rid=values["rid"],
        versions=tuple((version, first, last) for version, first, last in values["versions"]),
        finish_reason=values["finish_reason"],
        started=values["started"],
        ended=values["ended"],
        experts=(start + at, head["experts"]) if head["experts"] else None,
    )
