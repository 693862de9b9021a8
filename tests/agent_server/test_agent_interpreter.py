"""A Python that cannot run the agent server says which one can."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from miles_core.agent_server import interpreter
from miles_core.agent_server.main import main


@pytest.mark.parametrize("lacking", ["3.12", "harbor"])
def test_another_interpreter_is_told_in_one_message(
    lacking: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if lacking == "3.12":
        monkeypatch.setattr(interpreter, "OLDEST", (sys.version_info.major, 99))
    else:
        monkeypatch.setattr(interpreter, "OLDEST", (3, 0))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--tasks-dir", str(tmp_path), "--trials-dir", str(tmp_path / "trials")]) == 2
    said = capsys.readouterr().err
    assert lacking in said and sys.executable in said and ".venv-agent" in said, said
    assert "Traceback" not in said and not (tmp_path / "trials").exists()
