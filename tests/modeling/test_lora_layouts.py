"""Adapters trained in any layout are those of one process, and any layout goes on with them."""

from pathlib import Path
from typing import Any

import pytest
from family_models import make_moe
from layout_helpers import alone, assert_same, assert_same_weights, run_cases
from layout_process import SAVED, train
from trainer_helpers import make_hf, make_rollout

LORA = {"lora_rank": 4, "lora_alpha": 16.0, "kl_loss_coef": 0.05, "lr": 5e-3}
TP, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EP, PADDED = {"expert_model_parallel_size": 2}, {"packing": False}
RECOMPUTE = {"recompute": True}

Cases = dict[str, tuple[str, dict[str, Any]]]
TWO: Cases = {
    "tp_sp_recompute": ("dense", TP | SP | RECOMPUTE),
    "dp": ("dense", {}),
    # hooks of latent attention see outputs with the adapters' part
    "moe_tp_sp_ep": ("glm4_moe_lite", TP | SP | EP),
}
MORE: Cases = {
    "tp": ("dense", TP),
    "pp_recompute": ("dense", PP | RECOMPUTE),
    "cp": ("dense", CP),
    "moe_tp_sp": ("glm4_moe_lite", TP | SP),
    "some": ("dense", TP | {"target_modules": ("k_proj", "up_proj", "o_proj")}),
    "tp_padded": ("dense", TP | PADDED | RECOMPUTE),
    "pp_padded": ("dense", PP | PADDED | {"micro_batch_size": 2}),
    "moe_ep": ("glm4_moe_lite", EP | RECOMPUTE),
    "moe_pp": ("glm4_moe_lite", PP),
    "moe_cp_ep": ("glm4_moe_lite", CP | EP),
}
FOUR: Cases = {
    "tp_pp_sp": ("dense", TP | PP | SP),
    "tp_cp": ("dense", TP | CP),
    "tp_dp": ("dense", TP),
    "tp_sp_cp_ep": ("glm4_moe_lite", TP | SP | CP | EP),
    "ep_pp": ("glm4_moe_lite", EP | PP | RECOMPUTE),
}


def compare(directory: Path, world: int, cases: Cases) -> None:
    """Each case against one process, which also goes on from a checkpoint of each case."""
    rollout = make_rollout(directory / "0.pt")
    for kind, _ in cases.values():
        hf = directory / kind
        if not hf.exists():
            make_hf(hf) if kind == "dense" else make_moe(hf, kind)
    requests = {
        name: {
            "hf": str(directory / kind),
            "changes": LORA | changes,
            "save": str(directory / f"at-{name}"),
        }
        for name, (kind, changes) in cases.items()
    }
    got = run_cases(directory, world, rollout, requests)
    single: dict[str, list[dict[str, Any]]] = {}
    for name, (kind, changes) in cases.items():
        chosen = {k: v for k, v in changes.items() if k == "target_modules"}
        label = f"one-{kind}-{bool(chosen)}"
        if label not in single:
            single[label] = alone(directory / kind, rollout, directory / label, **LORA, **chosen)
        want = single[label]
        assert want[-1]["kl_loss"] > 1e-3
        assert_same(name, got[name], want)
        assert_same_weights(directory / f"run-{name}", directory / label)
        case = {"load": str(directory / f"at-{name}"), "changes": LORA | chosen}
        again = train(case, str(rollout), export=directory / f"again-{name}")
        assert_same(name, again, want[SAVED:])
        assert_same_weights(directory / f"again-{name}", directory / label)


def test_two_ranks(tmp_path: Path) -> None:
    compare(tmp_path, 2, TWO)


@pytest.mark.slow
def test_more_of_two_ranks(tmp_path: Path) -> None:
    compare(tmp_path, 2, MORE)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    compare(tmp_path, 4, FOUR)


@pytest.mark.slow
def test_one_checkpoint_resumes_in_every_layout(tmp_path: Path) -> None:
    rollout = make_rollout(tmp_path / "0.pt")
    hf = make_moe(tmp_path / "hf", "glm4_moe_lite")
    case = {"hf": str(hf), "changes": LORA, "save": str(tmp_path / "saved")}
    want = train(case, str(rollout), export=tmp_path / "one")
    layouts = {"tp_sp": TP | SP, "pp": PP, "cp": CP, "ep": EP, "dp": {}, "tp_sp_ep": TP | SP | EP}
    got = run_cases(
        tmp_path,
        2,
        rollout,
        {name: {"load": case["save"], "changes": LORA | c} for name, c in layouts.items()},
    )
    for name in layouts:
        assert_same(name, got[name], want[SAVED:])
        assert_same_weights(tmp_path / f"run-{name}", tmp_path / "one")
