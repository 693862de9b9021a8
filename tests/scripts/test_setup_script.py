"""scripts/setup.py: finding interpreters, and what it says when something is missing."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("miles_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_shim_that_does_not_run_is_passed_over(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = sys.version_info[:2]
    name = f"python{version[0]}.{version[1]}"
    (tmp_path / "broken").mkdir()
    (tmp_path / "good").mkdir()
    broken = script(tmp_path / "broken" / name, "echo 'no such version' >&2; exit 127")
    good = script(tmp_path / "good" / name, f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{good.parent}{os.pathsep}/bin")
    monkeypatch.setattr(sys, "executable", str(broken))
    assert setup.probe(str(broken)) is None
    assert setup.find_python([version], ".venv") == str(good)


def test_no_interpreter_says_which_is_needed(setup: ModuleType) -> None:
    wanted = r"(?s)one of 3\.99 is needed.*uv python install 3\.99"
    with pytest.raises(setup.SetupError, match=wanted):
        setup.find_python([(3, 99)], ".venv-agent")


def test_missing_packages_without_root_give_the_command(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "apt-get", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(setup.SetupError, match="sudo apt-get install .* bubblewrap util-linux"):
        setup.system_packages()


def test_tmux_alone_does_not_stop_the_setup(
    setup: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in setup.SYSTEM_COMMANDS:
        script(tmp_path / name, "exit 0")
    script(tmp_path / "apt-get", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    setup.system_packages()
    said = capsys.readouterr().out
    assert "installing system packages: tmux" in said and "terminus-2 cannot run" in said


def test_the_stamp_follows_the_lock_and_not_the_tool_settings(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    (tmp_path / "lock.txt").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n[tool.ruff]\nline-length = 1\n")
    first = setup.stamp_of("lock.txt")
    (tmp_path / "pyproject.toml").write_text("[project]\n[tool.ruff]\nline-length = 2\n")
    assert setup.stamp_of("lock.txt") == first
    (tmp_path / "lock.txt").write_text("a==2\n")
    assert setup.stamp_of("lock.txt") != first


def test_locks_pin_everything_the_project_names() -> None:
    pins = {}
    for name in ("trainer", "agent"):
        lines = (ROOT / "locks" / f"{name}.txt").read_text().splitlines()
        pins[name] = {line.split("==")[0].lower() for line in lines if not line.startswith("#")}
        assert all("==" in line for line in lines if not line.startswith("#"))
    assert {"torch", "ray", "prefect", "megatron-core", "pytest", "ruff"} <= pins["trainer"]
    assert {"harbor", "mini-swe-agent", "fastapi", "pytest"} <= pins["agent"]
    assert not {"torch", "ray", "prefect"} & pins["agent"]
