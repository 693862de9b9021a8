"""What the fuzz tests send: any JSON, and values of all kinds in the place of right ones.

The same examples are drawn each time; `FUZZ_EXAMPLES=3000` draws so many others.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
MANY = settings(
    max_examples=int(EXAMPLES or 60),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["\ud800", "\udfffx", "\0", "<|im_end|>", "<|im_start|>system\n", "{{ 1 }}", "{% x %}",
         "<tool_call>", "</think>", "user", "tool", "assistant", "NaN", "1e999", "­"]
    ),
)  # fmt: skip
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, -1]),
    st.floats(),
    texts,
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def deep(depth: int, opening: str = "[", closing: str = "]", inside: str = "1") -> str:
    return opening * depth + inside + closing * depth


ODD = [
    "null", "true", "-1", "1.5", "1e999", "NaN", "1" * 400, '""', '"x"', '"\\ud800"', "[null]",
    "{}", '{"a": 1, "a": 2}', deep(990), deep(5000), deep(990, '{"a":', "}"),
]  # fmt: skip
"""JSON, or nearly, that is put in the place of every value in turn."""

raw_json = st.one_of(st.sampled_from(ODD), values.map(json.dumps))


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON value, the outermost too."""
    yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from paths(inner, (*at, key))


def replaced(base: dict[str, Any], path: tuple[Any, ...], text: str) -> bytes:
    """JSON of `base` with `text` in the place of one value."""
    value = copy.deepcopy(base)
    inner: Any = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "<<here>>"
    return json.dumps(value).replace('"<<here>>"', text).encode()


def each(base: dict[str, Any]) -> Any:
    """A test for each value of `base`."""
    found = [path for path in paths(base) if path]
    return pytest.mark.parametrize("path", found, ids=lambda path: ".".join(map(str, path)))


def mutated(base: dict[str, Any]) -> st.SearchStrategy[str]:
    """JSON of `base` with one to three values removed, doubled, or replaced by anything."""
    marks = [f"<<{n}>>" for n in range(3)]

    @st.composite
    def build(draw: st.DrawFn) -> str:
        value = copy.deepcopy(base)
        for mark in marks[: draw(st.integers(1, 3))]:
            found = [path for path in paths(value) if path]
            if not found:
                break
            *way, last = draw(st.sampled_from(found))
            inner: Any = value
            for key in way:
                inner = inner[key]
            change = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
            if change == "replace":
                inner[last] = mark
            elif change == "remove":
                del inner[last]
            elif isinstance(inner, list):
                inner.append(inner[last])
            else:
                inner[f"{last}_"] = inner[last]
        text = json.dumps(value)
        for mark in marks:
            text = text.replace(f'"{mark}"', draw(raw_json))
        return text

    return build()


def check_error(response: httpx.Response) -> None:
    """A refusal is OpenAI's error object, and tells why."""
    assert response.headers["content-type"].startswith("application/json"), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
