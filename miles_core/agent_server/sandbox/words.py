"""Words of a Dockerfile: quotes, escapes and variables, as the Dockerfile reference has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-+])((?:[^{}]|\{[^{}]*\})*))?\}")


class WordError(ValueError):
    """A text that is not made of whole words; the message says why."""


def split(text: str, variables: Mapping[str, str], escape: str = "\\") -> list[str]:
    """The words of `text` without their quotes, variables replaced.

    What a variable stands for is never split, and nothing is replaced in single quotes.
    """
    words: list[str] = []
    current: list[str] | None = None
    at = 0
    while at < len(text):
        if text[at].isspace():
            if current is not None:
                words.append("".join(current))
            current = None
            at += 1
            continue
        piece, at = _piece(text, at, variables, escape)
        current = [*(current or []), piece]
    if current is not None:
        words.append("".join(current))
    return words


def whole(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """`text` as one word: its white space is kept."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            pieces.append(text[at])
            at += 1
            continue
        piece, at = _piece(text, at, variables, escape)
        pieces.append(piece)
    return "".join(pieces)


def raw_words(text: str, escape: str = "\\") -> list[str]:
    """The words of `text` as they are written, with their quotes and variables."""
    words: list[str] = []
    start: int | None = None
    at = 0
    while at < len(text):
        if text[at].isspace():
            if start is not None:
                words.append(text[start:at])
            start = None
            at += 1
            continue
        if start is None:
            start = at
        at = _end_of_piece(text, at, escape)
    if start is not None:
        words.append(text[start:])
    return words


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """Replace the variables of `text`; quotes mean nothing."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == escape and text[at + 1 : at + 2] == "$":
            pieces.append("$")
            at += 2
        elif text[at] == "$":
            piece, at = _variable(text, at, variables, escape)
            pieces.append(piece)
        else:
            pieces.append(text[at])
            at += 1
    return "".join(pieces)


def _piece(text: str, at: int, variables: Mapping[str, str], escape: str) -> tuple[str, int]:
    """One quoted text, variable or character from `at` on, and where the next one begins."""
    mark = text[at]
    if mark == "'":
        end = text.find("'", at + 1)
        if end < 0:
            raise WordError("a ' has no end")
        return text[at + 1 : end], end + 1
    if mark == '"':
        return _quoted(text, at + 1, variables, escape)
    if mark == "$":
        return _variable(text, at, variables, escape)
    if mark == escape and at + 1 < len(text):
        return text[at + 1], at + 2
    return mark, at + 1


def _quoted(text: str, at: int, variables: Mapping[str, str], escape: str) -> tuple[str, int]:
    pieces: list[str] = []
    while at < len(text):
        mark = text[at]
        if mark == '"':
            return "".join(pieces), at + 1
        if mark == escape and text[at + 1 : at + 2] in ('"', "$", escape):
            pieces.append(text[at + 1])
            at += 2
        elif mark == "$":
            piece, at = _variable(text, at, variables, escape)
            pieces.append(piece)
        else:
            pieces.append(mark)
            at += 1
    raise WordError('a " has no end')


def _end_of_piece(text: str, at: int, escape: str) -> int:
    mark = text[at]
    if mark == "'":
        end = text.find("'", at + 1)
        return len(text) if end < 0 else end + 1
    if mark == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at += 2 if text[at] == escape else 1
        return min(at + 1, len(text))
    return min(at + (2 if mark == escape else 1), len(text))


def _variable(text: str, at: int, variables: Mapping[str, str], escape: str) -> tuple[str, int]:
    name = _NAME.match(text, at + 1)
    if name:
        return variables.get(name.group(), ""), name.end()
    braced = _BRACED.match(text, at + 1)
    if braced is None:
        if text[at + 1 : at + 2] == "{":
            raise WordError(f"{text[at : at + 40]} is not a variable")
        return "$", at + 1
    key, operator, word = braced.groups()
    found = variables.get(key)
    present = bool(found) if (operator or "").startswith(":") else found is not None
    if operator and operator.endswith("-") and not present:
        return expand(word, variables, escape), braced.end()
    if operator and operator.endswith("+"):
        return expand(word, variables, escape) if present else "", braced.end()
    return found or "", braced.end()
