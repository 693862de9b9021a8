"""`miles checkpoint`: what a person sees, and exit statuses."""

import json
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_helpers import Crasher
from safetensors.torch import load_file, save_file
from trainer_helpers import make_hf, single, weights
from transformers import AutoModelForCausalLM

from miles_cli.main import main
from miles_core.checkpoints.contents import contents
from miles_core.modeling.shard_reader import read_index


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("source") / "hf", tied=False)


@pytest.fixture(scope="module")
def converted(hf: Path) -> Path:
    out = hf.parent / "torch_dist"
    assert main(["checkpoint", "convert", str(hf), str(out)]) == 0
    return out


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    main(["checkpoint", *argv, "--json"])
    return json.loads(capsys.readouterr().out)


def test_convert_says_how_far_it_is_and_does_nothing_twice(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["checkpoint", "convert", str(hf), out, "--check", "tensors"]) == 0
    said = capsys.readouterr()
    assert "every tensor equals" in said.out
    last = said.err.strip().splitlines()[-1]
    assert "6 of 6 files" in last and "about 0 s left" in last
    assert main(["checkpoint", "convert", str(hf), out]) == 0
    assert "already holds" in capsys.readouterr().out


def test_export_of_a_folder_of_checkpoints_is_of_the_newest(
    crasher: Crasher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = crasher.work / "start" / "checkpoints"
    answer = ask(capsys, "export", str(root), str(tmp_path / "out"), "--max-shard-size", "20KB")
    assert Path(answer["source"]).name == "iter_0000002" and len(answer["files"]) > 1
    with single(root / "iter_0000002", crasher.work / "base") as worker:
        want = weights(worker)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    got = model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("content", ["", "[]", '{"files": {"hf": 1}}', None])
def test_nothing_is_exported_that_cannot_be_checked(
    crasher: Crasher, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    checkpoint = tmp_path / "iter_0000002"
    shutil.copytree(crasher.work / "start" / "checkpoints" / "iter_0000002", checkpoint)
    (checkpoint / "MANIFEST.json").unlink()
    if content is not None:
        (checkpoint / "MANIFEST.json").write_text(content)
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "MANIFEST.json is missing or unreadable" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for a quota and for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        status = main(["checkpoint", "export", str(converted), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2
    assert "model.safetensors: File too large" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_base_is_for_adapters(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "export", str(converted), str(tmp_path / "out")]
    assert main([*words, "--base", str(converted)]) == 2
    assert "leave --base out" in capsys.readouterr().err


@pytest.mark.parametrize("tp", [1, 2])
def test_export_of_two_ranks_checkpoint_is_what_a_trainer_loads(
    crasher: Crasher, tmp_path: Path, tp: int
) -> None:
    name = f"export-{tp}"
    crasher.run(name, until=1, world=2, tp=tp, saves=[1])
    checkpoint = crasher.work / name / "checkpoints" / "iter_0000001"
    assert main(["checkpoint", "export", str(checkpoint), str(tmp_path / "out")]) == 0
    with single(checkpoint, crasher.work / "base") as worker:
        want = weights(worker)
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_verify_tells_whole_from_damaged(
    crasher: Crasher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(crasher.work / "start" / "checkpoints", root)
    assert main(["checkpoint", "verify", str(root)]) == 0
    assert capsys.readouterr().out.count(" whole\n") == 4
    (root / "iter_0000001" / "common.pt").write_bytes(b"")
    assert main(["checkpoint", "verify", str(root)]) == 1
    assert "common.pt has 0 bytes" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(root / "iter_0000002")]) == 0


def test_verify_compares_with_the_source(
    hf: Path, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "verify", str(converted), "--hf", str(hf)]) == 0
    said = capsys.readouterr().out
    assert "equal bit for bit" in said and "of the largest" in said
    other = tmp_path / "other"
    shutil.copytree(hf, other)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][3, 4] += 1e-6
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["checkpoint", "verify", str(converted), "--hf", str(other)]) == 1
    assert "1 differ" in capsys.readouterr().out


def test_an_index_that_misses_a_part_is_noticed(converted: Path, tmp_path: Path) -> None:
    from miles_core.checkpoints.verify import verify

    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    index = read_index(copy)
    entry = index.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    del entry.chunks[1]  # type: ignore[union-attr]
    (copy / ".metadata").write_bytes(pickle.dumps(index))
    (copy / "MANIFEST.json").unlink()
    assert "missing" in str(verify(copy).checks[0].problem)
    from miles_core.checkpoints import manifest

    manifest.seal(copy, kind="converted")
    (files, parts) = verify(copy).checks
    assert files.problem is None and "linear_fc1" in str(parts.problem)


def test_inspect_counts_what_is_there(
    hf: Path, converted: Path, crasher: Crasher, capsys: pytest.CaptureFixture[str]
) -> None:
    values = sum(t.numel() for t in load_file(hf / "model.safetensors").values())
    shown = ask(capsys, "inspect", str(converted))
    assert shown["kind"] == "converted" and shown["model_type"] == "qwen3"
    model = shown["sections"][0]
    assert (model["name"], model["values"], model["bytes"]) == ("model", values, 4 * values)
    assert "MANIFEST.json" not in shown["files"] and "common.pt" in shown["files"]

    root = crasher.work / "start" / "checkpoints"
    held = contents(root / "iter_0000002")
    sections = {section.name: section for section in held.sections}
    assert (held.kind, held.iteration, held.steps, held.ranks) == ("checkpoint", 2, 2, 1)
    assert held.cursor is not None and held.cursor["position"] == 4
    assert sections["optimizer"].values == 3 * sections["model"].values
    assert main(["checkpoint", "inspect", str(root), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "iteration       2" in said and "exp_avg_sq.decoder.layers" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["convert", "missing", "out"], "missing is not a directory"),
        (["export", "missing", "out"], "neither a checkpoint"),
        (["inspect", "missing"], "neither a checkpoint"),
        (["verify", "missing"], "neither a checkpoint"),
        (["export", "a", "b", "--max-shard-size", "big"], "is not a size"),
        (["convert", "a", "b", "--workers", "0"], "not at least 1"),
        (["inspet", "a"], "Did you mean inspect"),
    ],
)
def test_mistakes_are_told_in_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", *argv]) == 2
    assert says in capsys.readouterr().err


class Evil:
    def __reduce__(self) -> Any:
        return print, ("called",)


def test_an_index_is_not_a_way_to_run_code(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    (copy / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert main(["checkpoint", "inspect", str(copy)]) == 2
    said = capsys.readouterr()
    assert "called" not in said.out and "holds no builtins.print" in said.err
