"""The quick look at a line finds what the decoder of whole lines finds, or passes."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.fields import FieldDecoder

decoder = FieldDecoder(("a", "b.c"))

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "b.c", "c"]) | TEXT, JSON), st.booleans())
def test_the_wanted_fields_are_those_of_the_whole_line(row: dict[str, Any], short: bool) -> None:
    line = json.dumps(row, ensure_ascii=short, separators=(",", ":") if short else None).encode()
    try:
        whole = orjson.loads(line)
    except orjson.JSONDecodeError:  # a number that is too large
        assert decoder.decode(line) is None
        return
    found = decoder.decode(line)
    if found is not None:
        assert found == {k: v for k, v in whole.items() if k in ("a", "b", "b.c")}


@given(st.data())
def test_damaged_lines_are_never_taken(data: st.DataObject) -> None:
    row = {"a": "é \U0001f600 \\ \n", "b": {"c": [1.5e10, -0.0, True, None]}, "x": "\u2028\x7f"}
    line = bytearray(json.dumps(row, ensure_ascii=data.draw(st.booleans())).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(line)
    found = decoder.decode(damaged)
    if found is not None:
        whole = orjson.loads(damaged)  # raises, and so fails, where the quick look was too kind
        assert found == {k: v for k, v in whole.items() if k in ("a", "b", "b.c")}


def test_an_ordinary_line_is_taken() -> None:
    line = b'{"a": "\\u00e9", "x": 1e3, "b": {"c": [1, {"d": null}]}}'
    assert decoder.decode(line) == {"a": "é", "b": {"c": [1, {"d": None}]}}
    assert decoder.decode(b"{}") == {}


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": 1, "x": 1e999}',
        b'{"a": 1, "x": 1, "x": 2}',
        b'{"a": 1, "x": 123456789012345678901234}',
        b'{"a": 1, "x": "\xff"}',
        b'{"a": 1, "x": "\\ud800"}',
        b'{"a": 1} {}',
        b'{"a": 1',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b"[1]",
        b"1",
        b"",
    ],
)
def test_what_is_doubtful_is_left_to_the_decoder_of_whole_lines(line: bytes) -> None:
    assert decoder.decode(line) is None
