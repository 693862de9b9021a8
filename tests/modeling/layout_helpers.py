"""Layouts over real processes, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layout_process
import pytest
import torch
from rank_helpers import fork_ranks
from safetensors.torch import load_file


def run_cases(
    directory: Path, world: int, rollout: Path, cases: dict[str, dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Metrics of each case (hf, changes), the same on all ranks; exports beside them."""
    request = {"rollout": str(rollout), "cases": cases}
    answers = fork_ranks("layout_process", world, directory / "run", request)
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
