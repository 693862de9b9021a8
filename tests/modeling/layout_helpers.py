"""Layouts over real processes, compared with one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import layout_process
import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("layout_process.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_cases(
    directory: Path, world: int, rollout: Path, cases: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Metrics of each case (hf, changes), the same on all ranks; exports beside them."""
    request = {
        "rollout": str(rollout),
        "cases": {name: {**case, "port": free_port()} for name, case in cases.items()},
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                str(rank),
                str(world),
                str(directory / "run"),
                json.dumps(request),
            ],
            env=env,
        )
        for rank in range(world)
    ]
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    answers = [json.loads((directory / f"run.rank{rank}").read_text()) for rank in range(world)]
    for answer in answers[1:]:
        for name in cases:
            for ours, first in zip(answer[name], answers[0][name], strict=True):
                timeless = {k: v for k, v in first.items() if not k.startswith("seconds")}
                assert timeless == {k: ours[k] for k in timeless}, name
    return answers[0]


def alone(hf: Path, rollout: Path, export: Path, **changes: Any) -> list[dict[str, Any]]:
    """The same steps in this process."""
    return layout_process.train({"hf": str(hf), "changes": changes}, str(rollout), export=export)


def resumed_alone(checkpoint: Path, rollout: Path, export: Path) -> list[dict[str, Any]]:
    """The steps after a checkpoint in this process."""
    case = {"load": str(checkpoint), "changes": {}}
    return layout_process.train(case, str(rollout), export=export)


def assert_same(
    name: str, got: list[dict[str, Any]], want: list[dict[str, Any]], tolerance: float = 1e-4
) -> None:
    """Loss and gradient norm of every step, and what else says how the model sees the tokens."""
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        for key in ("loss", "grad_norm", "entropy", "train_rollout_logprob_abs_diff"):
            expected = pytest.approx(b[key], rel=tolerance, abs=tolerance * 0.1)
            assert a[key] == expected, (name, step, key)


def assert_same_weights(got: Path, want: Path, tolerance: float = 2e-4) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (got, want))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=tolerance), name
