"""Loss, gradient norm and weights after five steps are the same however the work is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import make_moe
from layout_helpers import (
    alone,
    assert_same,
    assert_same_weights,
    resumed_alone,
    run_cases,
)
from layout_process import SAVED, train
from safetensors.torch import load_file
from trainer_helpers import make_hf, make_rollout

TP, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EP, PADDED = {"expert_model_parallel_size": 2}, {"packing": False}
RECOMPUTE = {"recompute": True}

Cases = dict[str, tuple[str, dict[str, Any]]]
TWO: Cases = {
    "tp_sp_recompute": ("dense", TP | SP | RECOMPUTE),
    "pp": ("dense", PP),
    "cp": ("dense", CP),
    "moe_ep": ("glm4_moe_lite", EP | {"micro_batch_size": 2}),
}
MORE: Cases = {
    "moe_pp": ("glm4_moe_lite", PP),
    "moe_tp_sp": ("glm4_moe_lite", TP | SP),
}
OF_ALL = {
    "tp_sp_padded": TP | SP | PADDED,
    "pp_padded": PP | PADDED | {"micro_batch_size": 2},
    "cp": CP,
    "cp_padded": CP | PADDED,
    "dp": {},
}
WITH_EXPERTS = {"ep": EP, "tp_sp_ep": TP | SP | EP | RECOMPUTE, "cp_ep": CP | EP | RECOMPUTE}
FOUR: Cases = {
    "tp_pp_sp": ("dense", TP | PP | SP),
    "tp_cp": ("dense", TP | CP),
    "pp_cp": ("dense", PP | CP | PADDED),
    "tp_dp": ("dense", TP),
    "cp4": ("dense", {"context_parallel_size": 4}),
    "pp_dp": ("dense", PP | RECOMPUTE | {"micro_batch_size": 1}),
    "ep4": ("glm4_moe_lite", {"expert_model_parallel_size": 4}),
    "ep_pp": ("glm4_moe_lite", EP | PP),
    "tp_sp_ep4": ("glm4_moe_lite", TP | SP | {"expert_model_parallel_size": 4}),
    "tp_sp_ep_pp": ("glm4_moe_lite", TP | SP | EP | PP),
    "cp_ep_dp": ("glm4_moe_lite", CP | EP),
    "tp_sp_cp_ep": ("glm4_moe_lite", TP | SP | CP | EP),
}


def model(directory: Path, kind: str) -> Path:
    if kind in ("dense", "untied"):
        return make_hf(directory / kind, "qwen3", tied=kind == "dense")
    return make_moe(directory / kind, kind)


def compare(directory: Path, world: int, cases: Cases) -> None:
    """Each case against one process, and a checkpoint of each case resumed by one process."""
    rollout = make_rollout(directory / "0.pt")
    kinds = {kind for kind, _ in cases.values()}
    hf = {kind: model(directory, kind) for kind in kinds}
    want = {kind: alone(hf[kind], rollout, directory / f"one-{kind}") for kind in kinds}
    got = run_cases(
        directory,
        world,
        rollout,
        {
            name: {"hf": str(hf[kind]), "changes": changes, "save": str(directory / f"at-{name}")}
            for name, (kind, changes) in cases.items()
        },
    )
    for name, (kind, _) in cases.items():
        assert_same(name, got[name], want[kind])
        assert_same_weights(directory / f"run-{name}", directory / f"one-{kind}")
        again = resumed_alone(directory / f"at-{name}", rollout, directory / f"resumed-{name}")
        assert_same(name, again, want[kind][SAVED:])
        assert_same_weights(directory / f"resumed-{name}", directory / f"one-{kind}")


@pytest.mark.parametrize("cases", [TWO, pytest.param(MORE, marks=pytest.mark.slow)])
def test_two_ranks(tmp_path: Path, cases: Cases) -> None:
    compare(tmp_path, 2, cases)


@pytest.mark.slow
def test_one_checkpoint_resumes_in_every_layout(tmp_path: Path) -> None:
    rollout = make_rollout(tmp_path / "0.pt")
    kind = "glm4_moe_lite"
    case = {"hf": str(model(tmp_path, kind)), "changes": {}, "save": str(tmp_path / "saved")}
    want = train(case, str(rollout), export=tmp_path / "one")
    layouts = OF_ALL | WITH_EXPERTS
    got = run_cases(
        tmp_path,
        2,
        rollout,
        {name: {"load": case["save"], "changes": changes} for name, changes in layouts.items()},
    )
    for name in layouts:
        assert_same(name, got[name], want[SAVED:])
        assert_same_weights(tmp_path / f"run-{name}", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "untied", "qwen3_moe", "glm4_moe", "glm4_moe_lite"])
def test_two_ranks_of_every_family(kind: str, tmp_path: Path) -> None:
    own = {"tp": TP} if kind in ("dense", "untied") else WITH_EXPERTS
    compare(tmp_path, 2, {name: (kind, changes) for name, changes in (OF_ALL | own).items()})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "glm4_moe_lite"])
def test_four_ranks(kind: str, tmp_path: Path) -> None:
    compare(tmp_path, 4, {name: case for name, case in FOUR.items() if case[0] == kind})


@pytest.mark.parametrize("kind", ["dense", "glm4_moe_lite"])
def test_micro_batches_and_recompute(kind: str, tmp_path: Path) -> None:
    """One sample at a time, two, eight; packed and padded; trajectories whole and split."""
    hf = model(tmp_path, kind)
    whole = make_rollout(tmp_path / "0.pt")
    (tmp_path / "split").mkdir()
    split = make_rollout(tmp_path / "split" / "0.pt", split=True)
    want = alone(hf, whole, tmp_path / "want", max_tokens_per_gpu=4096)
    for number, (rollout, changes) in enumerate(
        [
            (whole, {"micro_batch_size": 1}),
            (whole, {"micro_batch_size": 2, **PADDED}),
            (whole, {"micro_batch_size": 8, **PADDED}),
            (whole, {"micro_batch_size": 8, **RECOMPUTE}),
            (split, {"micro_batch_size": 2, **PADDED}),
            (split, {}),
        ]
    ):
        got = alone(hf, rollout, tmp_path / f"got-{number}", **changes)
        assert_same(str(changes), got, want)
        assert_same_weights(tmp_path / f"got-{number}", tmp_path / "want")


def test_bfloat16_leaves_the_routers_bias_as_it_was(tmp_path: Path) -> None:
    hf, rollout = model(tmp_path, "glm4_moe_lite"), make_rollout(tmp_path / "0.pt")
    single = alone(hf, rollout, tmp_path / "float32")
    half = alone(hf, rollout, tmp_path / "bfloat16", dtype="bfloat16")
    for a, b in zip(half, single, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.1)
    before, after = (load_file(path / "model.safetensors") for path in (hf, tmp_path / "bfloat16"))
    assert {str(value.dtype) for value in after.values()} == {"torch.bfloat16", "torch.float32"}
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(after[name], before[name])
