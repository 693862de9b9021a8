"""A process that makes small training runs on request, and what their logs say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


class Crasher:
    """Asks `crash_run.py` for runs; each run has a folder of its own below `work`."""

    def __init__(self, work: Path, base: Path, rows: Path) -> None:
        self.work, self._base, self._rows = work, base, rows
        self._start()

    def _start(self) -> None:
        script = Path(__file__).with_name("crash_run.py")
        with open(self.work / "stderr", "a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def run(self, name: str, until: int, world: int = 1, tp: int = 1, **plan: Any) -> Any:
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        request = {
            "root": str(folder / "checkpoints"),
            "log": str(folder / "log"),
            "base": str(self._base),
            "rows": str(self._rows),
            "world": world,
            "tp": tp,
            "until": until,
            "saves": [],
            **plan,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:  # it failed at this run; the next test has a living one
            self.close()
            self._start()
        assert answer, (self.work / "stderr").read_text()[-3000:]
        result = json.loads(answer)
        if not result["killed"]:
            assert not any(result["codes"]), (self.work / "stderr").read_text()[-3000:]
        return result

    def copy(self, source: str, name: str) -> Path:
        """A run that stands where another one stands; its checkpoints."""
        shutil.copytree(self.work / source, self.work / name)
        return self.work / name / "checkpoints"

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = (self.work / name / "log").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        finally:
            self._process.kill()
            self._process.wait()


def assert_same(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """The same rows in every step, and the same losses but for rounding."""
    assert [(e["step"], e["rows"]) for e in got] == [(e["step"], e["rows"]) for e in want]
    for a, b in zip(got, want, strict=True):
        for name in ("loss", "grad_norm", "lr", "kl_loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-7), (a["step"], name)


def effective(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that count: a resume takes back what was trained after its checkpoint."""
    steps: list[dict[str, Any]] = []
    for entry in log:
        if "resumed" in entry:
            assert entry["resumed"] <= len(steps), "a step was skipped"
            del steps[entry["resumed"] :]
        else:
            assert entry["step"] == len(steps), "a step was skipped or repeated"
            steps.append(entry)
    return steps
