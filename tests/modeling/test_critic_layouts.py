"""Policy and critic after five steps of PPO are the same however the work is cut."""

from pathlib import Path
from typing import Any

import pytest
from family_models import make_moe
from layout_helpers import alone, assert_same, assert_same_weights, run_cases
from layout_process import SAVED, train
from trainer_helpers import make_hf, make_rollout

PPO = {"advantage_estimator": "ppo", "lambd": 0.9, "critic_lr": 5e-3, "value_clip": 0.01}
TP, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EP, PADDED = {"expert_model_parallel_size": 2}, {"packing": False}
RECOMPUTE = {"recompute": True}

VALUES = ("value_loss", "critic_grad_norm", "value_mean", "return_mean", "advantage_std")


def assert_same_values(name: str, got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert_same(name, got, want)
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        for key in VALUES:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), (name, step, key)


def compare(hf: Path, directory: Path, world: int, cases: dict[str, dict[str, Any]]) -> None:
    """Each case against one process, and a checkpoint of each case resumed by one process."""
    rollout = make_rollout(directory / "0.pt")
    (directory / "split").mkdir()
    split = make_rollout(directory / "split" / "0.pt", split=True)
    want = alone(hf, rollout, directory / "one", **PPO)
    assert all(w["value_clipfrac"] > 0 and w["pg_clipfrac"] > 0 for w in want)
    requests = {
        name: {"hf": str(hf), "changes": PPO | changes, "save": str(directory / f"at-{name}")}
        for name, changes in cases.items()
    }
    got = run_cases(directory, world, split, requests)
    for name in cases:
        assert_same_values(name, got[name], want)
        assert_same_weights(directory / f"run-{name}", directory / "one")
        again = train(
            {"load": str(directory / f"at-{name}"), "changes": PPO},
            str(rollout),
            export=directory / f"resumed-{name}",
        )
        assert_same_values(name, again, want[SAVED:])
        assert_same_weights(directory / f"resumed-{name}", directory / "one")


@pytest.mark.parametrize(
    "cases",
    [
        {"tp_sp": TP | SP | RECOMPUTE, "pp": PP},
        pytest.param({"cp": CP, "dp": {}}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(tmp_path: Path, cases: dict[str, dict[str, Any]]) -> None:
    compare(make_hf(tmp_path / "dense"), tmp_path, 2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_packed_and_padded(tied: bool, tmp_path: Path) -> None:
    cases = {
        "tp": TP,
        "tp_sp_padded": TP | SP | PADDED,
        "pp_padded": PP | PADDED | {"micro_batch_size": 2},
        "cp_padded": CP | PADDED | RECOMPUTE,
        "dp": {"micro_batch_size": 1},
    }
    compare(make_hf(tmp_path / "dense", tied=tied), tmp_path, 2, cases)


@pytest.mark.slow
def test_two_ranks_with_experts(tmp_path: Path) -> None:
    cases = {"ep": EP, "tp_sp_ep": TP | SP | EP, "pp": PP, "tp_sp": TP | SP}
    compare(make_moe(tmp_path / "moe", "glm4_moe_lite"), tmp_path, 2, cases)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    cases = {"tp_pp_sp": TP | PP | SP, "pp_cp": PP | CP, "tp_dp": TP}
    compare(make_hf(tmp_path / "dense"), tmp_path, 4, cases)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1} | PADDED | RECOMPUTE,
        pytest.param({"micro_batch_size": 2}, marks=pytest.mark.slow),
        pytest.param({"micro_batch_size": 8} | PADDED, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_and_samples(changes: dict[str, Any], tmp_path: Path) -> None:
    """A few samples at a time, packed and padded, of trajectories whole and split."""
    hf = make_hf(tmp_path / "dense")
    whole = make_rollout(tmp_path / "0.pt")
    (tmp_path / "split").mkdir()
    split = make_rollout(tmp_path / "split" / "0.pt", split=True)
    want = alone(hf, whole, tmp_path / "want", max_tokens_per_gpu=4096, **PPO)
    got = alone(hf, split, tmp_path / "got", **PPO, **changes)
    assert_same_values(str(changes), got, want)
