"""Rewritten modules of megatron are compiled once; what is kept never outlives its source."""

import sys
from pathlib import Path

import pytest

from miles_core.modeling import cpu_shim

SOURCE = 'import torch\nfound = torch.device("cuda")\nnumber = {}\n'


def value(path: Path) -> tuple[str, int]:
    code = cpu_shim._Loader("megatron.core.example", str(path)).get_code("megatron.core.example")
    names: dict = {}
    exec(code, names)
    return str(names["found"]), names["number"]


def test_kept_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    path = tmp_path / "example.py"
    path.write_text(SOURCE.format(1))
    assert value(path) == ("cpu", 1)
    (kept,) = (tmp_path / "__pycache__").iterdir()
    with monkeypatch.context() as context:
        context.setattr(cpu_shim._ToCpu, "visit", lambda *_: pytest.fail("compiled again"))
        assert value(path) == ("cpu", 1)
    path.write_text(SOURCE.format(2))
    assert value(path) == ("cpu", 2)
    whole = kept.read_bytes()
    for broken in (b"", whole[:5], whole[:40], whole[:8] + b"\x00"):
        kept.write_bytes(broken)
        assert value(path) == ("cpu", 2)
    assert kept.read_bytes() == whole


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    path = tmp_path / "example.py"
    path.write_text(SOURCE.format(1))
    (tmp_path / "__pycache__").write_text("in the way")
    assert value(path) == ("cpu", 1)
