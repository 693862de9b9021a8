"""Conversion of raw rows: keys, ids, bad rows, atomic output."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.data.convert import SHOWN_BAD_ROWS, ConvertOptions, ConvertReport, convert
from miles_core.data.rows import BadRow, DataError, lookup, task_id, valid_id


def swe(i: int) -> dict[str, Any]:
    return {
        "repo": "org/pkg",
        "instance_id": f"org__pkg-{i}",
        "problem_statement": f'It fails\r\nwith "{i}" \\ é \u2028 \U0001f600',
        "hints_text": None,
        "FAIL_TO_PASS": '["a::b"]',
        "nested": {"a": [1, 2.5, {"b": None}], "big": 12345678901234567890123},
    }


def nested(name: str) -> dict[str, Any]:
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": f"do {name}"}],
            "metadata": {"instance_id": f"terminal_bench::{name}", "cpus": "1"},
        }
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def run(source: Path, output: Path, **options: Any) -> ConvertReport:
    return convert(ConvertOptions(input=str(source), output=output, **options))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_swe_rows_keep_every_field(tmp_path: Path, out: Path) -> None:
    rows = [swe(i) for i in range(5)]
    report = run(write(tmp_path / "in.jsonl", rows), out, agent_name="oracle", split="test")
    assert report.rows == 5
    for row, made in zip(rows, read(out), strict=True):
        assert made["prompt"] == row["problem_statement"]
        assert made["metadata"] == {**row, "agent_name": "oracle", "split": "test"}


def test_values_that_a_decoder_would_change_are_kept(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"id": "a", "prompt": "p", "n": 1.10, "big": 123456789012345678901234567890}'
    )
    run(source, out)
    assert '"n": 1.10, "big": 123456789012345678901234567890' in out.read_text()


def test_nested_keys_and_namespaced_ids(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", [nested("fix-git"), nested("write-file")])
    report = run(
        source,
        out,
        prompt_key="responses_create_params.input",
        id_key="responses_create_params.metadata.instance_id",
    )
    made = read(out)
    assert [row["metadata"]["instance_id"] for row in made] == ["fix-git", "write-file"]
    assert made[0]["metadata"]["source_id"] == "terminal_bench::fix-git"
    assert (
        made[0]["metadata"]["responses_create_params"]
        == nested("fix-git")["responses_create_params"]
    )
    assert made[0]["prompt"] == [{"role": "user", "content": "do fix-git"}]
    assert report.mapped_ids == 2
    run(
        source,
        out,
        prompt_key="responses_create_params.input.0.content",
        id_key="responses_create_params.metadata.instance_id",
    )
    assert read(out)[1]["prompt"] == "do write-file"


def test_missing_key_says_which_there_are(tmp_path: Path, out: Path) -> None:
    with pytest.raises(DataError) as error:
        run(write(tmp_path / "in.jsonl", [nested("a"), nested("b")]), out)
    assert "in.jsonl:1: has nothing at any of problem_statement" in error.value.message
    assert error.value.fix.count("set --prompt-key to one of: responses_create_params.input") == 1
    assert not out.exists()


def test_ids_that_collide_are_an_error(tmp_path: Path, out: Path) -> None:
    rows = [
        {"id": "a/x", "prompt": "p"},
        {"id": "a/x", "prompt": "p"},
        {"id": "b/x", "prompt": "q"},
    ]
    with pytest.raises(DataError, match=r"in.jsonl:3: the id 'b/x' becomes 'x'"):
        run(write(tmp_path / "in.jsonl", rows), out)
    rows[2]["id"] = "b/y"
    assert run(write(tmp_path / "in.jsonl", rows), out).duplicate_ids == 1


def test_row_format_is_kept(tmp_path: Path, out: Path) -> None:
    row = {
        "prompt": "p",
        "metadata": {"instance_id": "a", "agent_name": "nop", "split": "dev", "extra": [1]},
    }
    run(write(tmp_path / "in.jsonl", [row]), out)
    assert read(out) == [row]
    again = tmp_path / "again.jsonl"
    run(out, again)
    assert again.read_bytes() == out.read_bytes()


def test_own_fields_that_differ_are_replaced_once(tmp_path: Path, out: Path) -> None:
    row = {"id": "n/a", "instance_id": "n/a", "prompt": "p", "agent_name": "nop", "split": "dev"}
    run(write(tmp_path / "in.jsonl", [row]), out, agent_name="oracle")
    text = out.read_text()
    assert text.count('"agent_name"') == text.count('"instance_id"') == 1
    assert read(out)[0]["metadata"] == {
        **row,
        "instance_id": "a",
        "agent_name": "oracle",
        "source_id": "n/a",
    }


BAD = [
    ('{"id": "a", "prompt": "p"', "not valid JSON.*the line is cut off"),
    ('{"id": "a", "prompt": "p"} x', "not valid JSON"),
    ('{"id": "a", "prompt": "\\ud800"}', "not valid JSON"),
    ('{"id": "a", "prompt": "p", "x": NaN}', "not valid JSON"),
    ("[1]", "not a JSON object"),
    ('{"id": "a", "prompt": "  "}', "prompt is empty"),
    ('{"id": "a", "prompt": []}', "prompt is empty"),
    ('{"id": "a", "prompt": 3}', "prompt is a number"),
    ('{"id": "a", "prompt": [{"content": "x"}]}', "message 0"),
    ('{"id": "", "prompt": "p"}', "id is empty"),
    ('{"id": "../..", "prompt": "p"}', "cannot name a task directory"),
    ('{"id": true, "prompt": "p"}', "id is true or false"),
    ('{"prompt": "p"}', "has nothing at any of instance_id"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_bad_row_names_the_line(tmp_path: Path, out: Path, line: str, reason: str) -> None:
    source = tmp_path / "in.jsonl"
    out.write_text("old\n")
    source.write_text('{"id": "ok", "prompt": "p"}\n\n' + line)
    with pytest.raises(DataError, match=rf"in\.jsonl:3: .*{reason}"):
        run(source, out)
    assert out.read_text() == "old\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    report = run(source, out, on_bad_row="skip")
    assert (report.rows, report.bad) == (1, 1)
    assert "in.jsonl:3" in report.bad_rows[0]
    assert [row["metadata"]["instance_id"] for row in read(out)] == ["ok"]


def test_invalid_utf8_is_a_bad_row(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"id": "a", "prompt": "p", "x": "\xff"}\n')
    with pytest.raises(DataError, match="in.jsonl:1: not valid JSON"):
        run(source, out)


def test_all_bad_rows_are_counted(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "a"}] * 50 + [swe(1)])
    with pytest.raises(DataError) as error:
        run(source, out)
    lines = error.value.message.splitlines()
    assert lines[-1] == "50 of 51 rows cannot be used"
    assert len(lines) == SHOWN_BAD_ROWS + 2


def test_nothing_usable_is_an_error(tmp_path: Path, out: Path) -> None:
    for rows in ([], [{"id": "a"}]):
        with pytest.raises(DataError, match="no usable row"):
            run(write(tmp_path / "in.jsonl", rows), out, on_bad_row="skip")
    assert not out.exists()


def test_limit_and_append(tmp_path: Path, out: Path) -> None:
    first = write(tmp_path / "a.jsonl", [swe(i) for i in range(5)])
    second = write(tmp_path / "b.jsonl", [swe(i) for i in range(4, 8)])
    assert run(first, out, limit=3).rows == 3
    out.write_bytes(out.read_bytes().rstrip(b"\n"))  # an editor may leave out the last newline
    report = run(second, out, append=True)
    assert (report.kept_rows, report.rows) == (3, 4)
    ids = [row["metadata"]["instance_id"] for row in read(out)]
    assert ids == [f"org__pkg-{i}" for i in (0, 1, 2, 4, 5, 6, 7)]
    assert run(first, out, append=True).duplicate_ids == 4


def test_append_refuses_a_file_of_something_else(tmp_path: Path, out: Path) -> None:
    out.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"out.jsonl:1: needs 'prompt'"):
        run(write(tmp_path / "in.jsonl", [swe(0)]), out, append=True)
    assert out.read_text() == '{"a": 1}\n'


def test_folder_gzip_and_parquet_inputs(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = [{k: v for k, v in swe(i).items() if k != "nested"} for i in range(6)]
    write(folder / "a.jsonl", rows[:2])
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[2:4]))
    pq.write_table(pa.Table.from_pylist(rows[4:]), folder / "c.parquet")
    (folder / "notes.txt").write_text("not rows")
    run(folder, out)
    extra = {"agent_name": "mini-swe-agent", "split": "train"}
    assert [row["metadata"] for row in read(out)] == [{**row, **extra} for row in rows]


def test_damaged_gzip(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(json.dumps(swe(0)).encode() * 100)[:-20])
    with pytest.raises(DataError, match="in.jsonl.gz:1: .*cut off"):
        run(source, out)


def test_dataset_saved_on_disk(tmp_path: Path, out: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"task_id": f"t{i}", "instruction": f"do {i}"} for i in range(3)]
    saved = datasets.DatasetDict({"dev": datasets.Dataset.from_list(rows)})
    saved.save_to_disk(str(tmp_path / "ds"))
    run(tmp_path / "ds", out, split="dev")
    assert [row["metadata"]["split"] for row in read(out)] == ["dev"] * 3
    with pytest.raises(DataError, match="no split 'train'"):
        run(tmp_path / "ds", out)


def test_parquet_output(tmp_path: Path, out: Path) -> None:
    rows = [{k: v for k, v in swe(i).items() if k != "nested"} for i in range(700)]
    rows[600]["late"] = {"x": 1}
    made = tmp_path / "out.parquet"
    source = write(tmp_path / "in.jsonl", rows)
    assert run(source, made).rows == 700
    table = pq.read_table(made)
    assert table.column_names == ["prompt", "metadata"]
    assert table["metadata"][600].as_py()["late"] == {"x": 1}
    assert table["metadata"][0].as_py()["late"] is None
    run(made, out)
    run(source, tmp_path / "direct.jsonl")
    for back, direct in zip(read(out), read(tmp_path / "direct.jsonl"), strict=True):
        back["metadata"] = {k: v for k, v in back["metadata"].items() if v is not None}
        direct["metadata"] = {k: v for k, v in direct["metadata"].items() if v is not None}
        assert back == direct
    run(source, made, append=True)
    assert pq.read_table(made).num_rows == 1400


def test_parquet_with_mixed_types_is_refused(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "p", "x": 1}, {"id": "b", "prompt": "p", "x": "one"}]
    with pytest.raises(DataError, match="do not fit"):
        run(write(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["missing.jsonl", "./nowhere", "rows.csv"])
def test_wrong_input(tmp_path: Path, out: Path, name: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(DataError):
        run(Path(name) if "/" not in name else tmp_path / name, out)
    with pytest.raises(DataError, match="written as .jsonl or .parquet"):
        run(write(tmp_path / "in.jsonl", [swe(0)]), tmp_path / "out.txt")


def test_memory_does_not_grow_with_the_input(tmp_path: Path, out: Path) -> None:
    row = swe(0) | {"patch": "x" * 20_000}
    peaks = []
    for copies in (100, 1000):
        source = write(tmp_path / "in.jsonl", [row] * copies)
        tracemalloc.start()
        run(source, out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000


KEYS = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(KEYS, min_size=1, max_size=5), st.integers())
def test_dotted_lookup_finds_what_was_nested(path: list[str], value: int) -> None:
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    assert lookup(tree, ".".join(path)) == value
    with pytest.raises(KeyError):
        lookup(tree, ".".join([*path, "more"]))


def test_lookup_in_lists_and_keys_with_dots() -> None:
    tree = {"a": [{"b": 1}, {"b": 2}], "x.y": {"z": 3}}
    assert lookup(tree, "a.1.b") == 2
    assert lookup(tree, "a.-1.b") == 2
    assert lookup(tree, "x.y.z") == 3
    for path in ("a.2.b", "a.x", "x", "a.0.b.c"):
        with pytest.raises(KeyError):
            lookup(tree, path)


@given(st.text(max_size=30))
def test_task_id_is_safe_or_refused(source: str) -> None:
    try:
        name = task_id(source)
    except BadRow:
        assert not valid_id(source)
    else:
        assert valid_id(name)
        assert source.endswith(name)
        assert "/" not in name and name not in (".", "..")


@pytest.mark.parametrize("source", ["../../etc", "/etc/passwd", "./a", "a//b", "a::", "::a"])
def test_a_path_is_no_task_id(source: str) -> None:
    with pytest.raises(BadRow):
        task_id(source)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
RESERVED = {"prompt", "instance_id", "metadata", "agent_name", "split", "source_id"}


@given(st.dictionaries(KEYS.filter(lambda k: k not in RESERVED), JSON, max_size=4), st.booleans())
def test_any_fields_come_back(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    row = {**fields, "prompt": "p", "instance_id": "a"}
    (folder / "in.jsonl").write_text(json.dumps(row, ensure_ascii=ascii_only), encoding="utf-8")
    run(folder / "in.jsonl", folder / "out.jsonl", prompt_key="prompt", id_key="instance_id")
    made = json.loads((folder / "out.jsonl").read_text(encoding="utf-8"))
    assert made["metadata"] == {**row, "agent_name": "mini-swe-agent", "split": "train"}


def test_rows_that_need_a_whole_look_come_out_the_same(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"id": "first", "prompt": "p", "id": "a"}\n'
        '{"id": "b", "prompt": "p", "n": 123456789012345678901234}\n'
        '{"id": "c", "prompt": "p"}\n'
    )
    run(source, out)
    lines = out.read_text().splitlines()
    assert [json.loads(line)["metadata"]["instance_id"] for line in lines] == ["a", "b", "c"]
    assert '"id": "first", "prompt": "p", "id": "a"' in lines[0]
    assert '"n": 123456789012345678901234' in lines[1]
    source.write_text('{"id": "a", "prompt": "p", "n": 1e999}\n')
    with pytest.raises(DataError, match="in.jsonl:1: not valid JSON: number is infinity"):
        run(source, out)
