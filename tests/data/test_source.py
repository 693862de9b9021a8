"""The prompt source: order, epochs, resuming; and the cache of prepared rows."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.convert import ConvertOptions, convert
from miles_core.data.outputs import output_lock
from miles_core.data.prepare import prepare_rows
from miles_core.data.rows import DataError
from miles_core.data.source import PromptSource


def make_rows(path: Path, n: int) -> Path:
    rows = [
        {"prompt": f"do é {i}", "metadata": {"instance_id": f"t{i}", "agent_name": "nop", "k": i}}
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return make_rows(tmp_path / "rows.jsonl", 7)


def ids(source: PromptSource, n: int) -> list[str]:
    return [row.instance_id for row in source.draw(n)]


def test_each_epoch_has_every_row_in_a_new_order(rows: Path) -> None:
    source = PromptSource(rows, 3)
    epochs = [ids(source, 7) for _ in range(4)]
    assert all(sorted(epoch) == [f"t{i}" for i in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [ids(PromptSource(rows, 3), 28)] == [sum(epochs, [])]
    assert ids(PromptSource(rows, 4), 28) != sum(epochs, [])


def test_order_of_the_file_without_shuffle(rows: Path) -> None:
    source = PromptSource(rows, 0, shuffle=False)
    assert ids(source, 9) == [f"t{i}" for i in (0, 1, 2, 3, 4, 5, 6, 0, 1)]


def test_row_has_what_the_line_has(rows: Path) -> None:
    row = PromptSource(rows, 0, shuffle=False).draw(3)[2]
    assert (row.prompt, row.instance_id, row.agent_name, row.index) == ("do é 2", "t2", "nop", 2)
    assert row.metadata == {"instance_id": "t2", "agent_name": "nop", "k": 2}
    assert PromptSource(rows).instance_ids() == {f"t{i}" for i in range(7)}


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 30), st.integers(0, 3))
def test_resuming_continues_the_same_sequence(
    tmp_path_factory: pytest.TempPathFactory, draws: list[int], more: int, seed: int
) -> None:
    rows = make_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 5)
    source = PromptSource(rows, seed)
    for n in draws:
        source.draw(n)
    state = json.loads(json.dumps(source.state()))
    expected = ids(source, more)
    resumed = PromptSource(rows, seed)
    resumed.draw(1)
    resumed.restore(state)
    assert ids(resumed, more) == expected


def test_restore_refuses_other_rows_or_order(rows: Path, tmp_path: Path) -> None:
    state = PromptSource(rows, 0).state()
    with pytest.raises(DataError, match="fingerprint"):
        PromptSource(make_rows(tmp_path / "other.jsonl", 8), 0).restore(state)
    with pytest.raises(DataError, match="seed"):
        PromptSource(rows, 1).restore(state)
    with pytest.raises(DataError, match="shuffle"):
        PromptSource(rows, 0, shuffle=False).restore(state)
    with pytest.raises(DataError, match="position"):
        PromptSource(rows, 0).restore({**state, "position": 99})


def test_parquet_has_the_same_rows(rows: Path, tmp_path: Path) -> None:
    made = tmp_path / "rows.parquet"
    convert(ConvertOptions(input=str(rows), output=made))
    lines, parquet = PromptSource(rows, 5), PromptSource(made, 5)
    assert ids(lines, 20) == ids(parquet, 20)


def test_bad_lines_are_all_named(rows: Path, tmp_path: Path) -> None:
    with open(rows, "a") as file:
        file.write('\n{"prompt": "p", "metadata": {"instance_id": "../x"}}\n{"prompt": "cut')
    with pytest.raises(DataError) as error:
        PromptSource(rows)
    assert "rows.jsonl:9: metadata.instance_id '../x'" in error.value.message
    assert "rows.jsonl:10: not valid JSON" in error.value.message
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        PromptSource(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="no such file"):
        PromptSource(tmp_path / "missing.jsonl")


def prepared(path: Path, cache: Path, **options: Any) -> tuple[bool, int, str]:
    result = prepare_rows(path, cache, **options)
    assert len(PromptSource(result.path)) == result.rows
    assert PromptSource(result.path).fingerprint == result.fingerprint
    return result.skipped, result.rows, result.fingerprint


def test_preparing_is_skipped_for_the_same_content(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepared(rows, cache)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(rows.read_bytes())
    assert first == (False, 7, first[2])
    assert prepared(moved, cache) == (True, 7, first[2])
    make_rows(rows, 8)
    assert prepared(rows, cache)[:2] == (False, 8)
    assert prepared(moved, cache, agent_name="oracle")[0] is False


@pytest.mark.parametrize("damage", ["rows", "manifest", "no manifest"])
def test_a_damaged_cache_is_made_again(rows: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    result = prepare_rows(rows, cache)
    manifest = result.path.parent / "manifest.json"
    if damage == "rows":
        result.path.write_text("")
    elif damage == "manifest":
        manifest.write_text('{"source"')
    else:
        manifest.unlink()
    assert prepared(rows, cache) == (False, 7, result.fingerprint)
    assert prepared(rows, cache)[0] is True


def test_raw_rows_are_converted(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"instance_id": "a", "problem_statement": "p"}\n')
    result = prepare_rows(raw, tmp_path / "cache", agent_name="oracle")
    row = PromptSource(result.path).draw(1)[0]
    assert (row.prompt, row.instance_id, row.agent_name) == ("p", "a", "oracle")
    raw.write_text('{"q": {"text": "x"}, "key": ["b"]}\n')
    result = prepare_rows(raw, tmp_path / "cache", prompt_key="q.text", id_key="key.0")
    assert PromptSource(result.path).draw(1)[0].instance_id == "b"


def test_missing_prompt_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.prompt_data: .*no such file"):
        prepare_rows(tmp_path / "nowhere.jsonl", tmp_path / "cache")


@pytest.mark.parametrize("keys", [{}, {"prompt_key": "q.text", "id_key": "key"}])
def test_the_advice_about_bad_rows_works(tmp_path: Path, keys: dict[str, str]) -> None:
    raw = tmp_path / "my rows.jsonl"
    good, bad = '{"prompt": "p", "q": {"text": "t"}, "key": "k", "id": "a"}\n', '{"id": "b"}\n'
    raw.write_text(good + bad)
    with pytest.raises(DataError) as error:
        prepare_rows(raw, tmp_path / "cache", **keys)
    assert "my rows.jsonl:2: has nothing at" in error.value.message
    assert "1 of 2 rows cannot be used" in error.value.message
    words = error.value.fix.splitlines()[0].partition("clean the file first: miles ")[2]
    command = [sys.executable, "-m", "miles_cli.main", *shlex.split(words)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    clean = prepare_rows(tmp_path / "clean.jsonl", tmp_path / "cache")
    row = PromptSource(clean.path).draw(1)[0]
    assert (row.prompt, row.instance_id) == (("t", "k") if keys else ("p", "a"))
    assert ("with the default --prompt-key" in error.value.fix) == bool(keys)
    with pytest.raises(DataError) as error:
        convert(ConvertOptions(input=str(raw), output=tmp_path / "out.jsonl"))
    assert "leave them out with --on-bad-row skip" in error.value.fix


def test_two_runs_that_prepare_the_same_rows_take_turns(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    manifest = prepare_rows(rows, cache).path.parent / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    with ThreadPoolExecutor(1) as pool, output_lock(manifest):
        waiting = pool.submit(prepare_rows, rows, cache)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        manifest.write_bytes(content)  # the other one is ready
        assert not waiting.done()
    assert waiting.result().skipped is True
