"""Routing replay in whole steps: the same in every layout, and what each setting replays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import make_moe
from layout_helpers import alone, assert_same, assert_same_weights, run_cases
from layout_process import CONFIG
from trainer_helpers import make_hf, make_rollout

from miles_core.modeling.hf_config import MoeSpec
from miles_core.training.batch import load_rollout, make_sample
from miles_core.training.routing import engine_experts
from miles_core.training.worker import TrainerWorker

LAYERS, EXPERTS, TOP = 4, 4, 2
TP, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EP, PADDED = {"expert_model_parallel_size": 2}, {"packing": False}
RECOMPUTE, ENGINE = {"recompute": True}, {"use_rollout_routing_replay": True}
OLD = {"use_routing_replay": True}
METRICS = ("routing_replayed", "routing_differs", "rollout_routing_differs")
TWO = {
    "pp": PP | RECOMPUTE | {"micro_batch_size": 2},
    "cp": CP | PADDED,
}
MORE = {
    "tp_sp_ep": TP | SP | EP | RECOMPUTE,
    "ep": EP | {"micro_batch_size": 2},
    "tp_sp": TP | SP | PADDED,
    "cp_ep": CP | EP | RECOMPUTE,
    "pp_padded": PP | PADDED,
    "dp": {},
}


def model(directory: Path, kind: str = "glm4_moe_lite") -> Path:
    """One dense layer and three with experts, so that both pipeline stages differ."""
    return make_moe(directory / "hf", kind, layers=LAYERS)


def with_experts(rollout: Path, whole: bool = False, dense: int = 1) -> Path:
    """Give the samples random experts of all layers; unless `whole` some rows and samples none.

    The first `dense` layers have no experts, and zeros here.
    """
    generator = torch.Generator().manual_seed(0)
    data = torch.load(rollout, weights_only=True)
    samples = [s for group in data["groups"] for t in group["trajectories"] for s in t["samples"]]
    for number, sample in enumerate(samples):
        rows = len(sample["tokens"]) - 1
        noise = torch.rand(rows, LAYERS, EXPERTS, generator=generator)
        experts = noise.argsort(-1)[..., :TOP].short()
        experts[:, :dense] = 0
        if not whole:
            experts[torch.rand(rows, generator=generator) < 0.2] = -1
        if whole or number % 5:
            sample["routed_experts"] = experts.flatten(1)
    torch.save(data, rollout)
    return rollout


def assert_same_routing(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    for a, b in zip(got, want, strict=True):
        for name in METRICS:
            assert a.get(name) == b.get(name), name


def test_two_ranks_send_tokens_where_one_does(tmp_path: Path) -> None:
    hf, rollout = model(tmp_path), with_experts(make_rollout(tmp_path / "0.pt"))
    cases = {
        f"{name}_{'both' if name == 'pp' else 'engine'}": {
            "hf": str(hf),
            "changes": changes | ENGINE | (OLD if name == "pp" else {}),
        }
        for name, changes in TWO.items()
    }
    want = {
        "engine": alone(hf, rollout, tmp_path / "engine", **ENGINE),
        "both": alone(hf, rollout, tmp_path / "both", **ENGINE, **OLD),
    }
    got = run_cases(tmp_path, 2, rollout, cases)
    for name in cases:
        kind = name.rpartition("_")[2]
        assert_same(name, got[name], want[kind])
        assert_same_routing(got[name], want[kind])
        assert_same_weights(tmp_path / f"run-{name}", tmp_path / kind)
    first = want["engine"][0]
    assert 0.5 < first["routing_replayed"] < 0.7
    assert want["both"][0]["routing_replayed"] == 1.0
    assert 0.3 < first["rollout_routing_differs"] < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "glm4_moe_lite"])
def test_two_ranks_of_every_family(kind: str, tmp_path: Path) -> None:
    hf = model(tmp_path, kind)
    rollout = with_experts(make_rollout(tmp_path / "0.pt"), dense=int(kind != "qwen3_moe"))
    want = alone(hf, rollout, tmp_path / "one", **ENGINE, **OLD)
    cases = {
        name: {"hf": str(hf), "changes": changes | ENGINE | OLD}
        for name, changes in (TWO | MORE).items()
    }
    got = run_cases(tmp_path, 2, rollout, cases)
    for name in cases:
        assert_same(name, got[name], want)
        assert_same_routing(got[name], want)
        assert_same_weights(tmp_path / f"run-{name}", tmp_path / "one")


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    hf, rollout = model(tmp_path), with_experts(make_rollout(tmp_path / "0.pt"))
    want = alone(hf, rollout, tmp_path / "one", **ENGINE, **OLD)
    layouts = {
        "tp_sp_ep_pp": TP | SP | EP | PP | RECOMPUTE,
        "tp_sp_cp_ep": TP | SP | CP | EP,
        "pp_cp": PP | CP | PADDED,
    }
    cases = {
        name: {"hf": str(hf), "changes": changes | ENGINE | OLD}
        for name, changes in layouts.items()
    }
    got = run_cases(tmp_path, 4, rollout, cases)
    for name in cases:
        assert_same(name, got[name], want)
        assert_same_routing(got[name], want)
        assert_same_weights(tmp_path / f"run-{name}", tmp_path / "one")


@pytest.mark.slow
def test_the_cut_into_micro_batches_does_not_show(tmp_path: Path) -> None:
    settings = ENGINE | OLD
    hf, rollout = model(tmp_path), with_experts(make_rollout(tmp_path / "0.pt"))
    want = alone(hf, rollout, tmp_path / "want", max_tokens_per_gpu=4096, **settings)
    for number, changes in enumerate(
        [{"micro_batch_size": 1}, {"micro_batch_size": 8, **PADDED, **RECOMPUTE}]
    ):
        got = alone(hf, rollout, tmp_path / f"got-{number}", **changes, **settings)
        assert_same(str(changes), got, want)
        assert_same_routing(got, want)
        assert_same_weights(tmp_path / f"got-{number}", tmp_path / "want")


def test_the_old_pass_is_replayed_after_the_first_update(tmp_path: Path) -> None:
    """Large steps move the routers: only replay keeps the second update of a step as it was."""
    hf, rollout = model(tmp_path), make_rollout(tmp_path / "0.pt")
    replayed = alone(hf, rollout, tmp_path / "replayed", lr=2e-2, **OLD)
    free = alone(hf, rollout, tmp_path / "free", lr=2e-2)
    assert replayed[0]["routing_replayed"] == 1.0
    assert replayed[0]["routing_differs"] > 0.01
    assert "rollout_routing_differs" not in replayed[0]
    assert replayed[0]["ppo_kl_k3"] != pytest.approx(free[0]["ppo_kl_k3"], rel=1e-3)


def test_the_reference_routes_itself(tmp_path: Path) -> None:
    hf = model(tmp_path)
    rollout = with_experts(make_rollout(tmp_path / "0.pt"), whole=True)
    worker = TrainerWorker(replace(CONFIG, **ENGINE))
    try:
        worker.init_from_hf(str(hf))
        policy = worker.policy
        policy._reference = policy._weights()  # the same as the policy's
        batch = load_rollout(rollout)
        assert policy.routing is not None
        policy.routing.begin(batch, batch.samples)
        parts = [[sample] for sample in batch.samples]
        policy.record_reference(parts)
        policy.record("old", parts)
        given = [sample.experts for sample in batch.samples]
        for sample in batch.samples:
            sample.experts = None
        policy.record("own", parts)
    finally:
        worker.close()
    assert all(experts is not None for experts in given)
    for sample in batch.samples:
        assert torch.equal(sample.logprobs["ref"], sample.logprobs["own"])
        assert not torch.allclose(sample.logprobs["ref"], sample.logprobs["old"], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1:], r"not \d+ rows of 6 or 8"),
        (lambda rows: rows[:, 1:], "layers x 2 experts"),
        (lambda rows: rows + 4 * (rows == 3), r"goes to \[.*7.*\] in layer"),
        (lambda rows: torch.zeros_like(rows), r"token 0 goes to \[0, 0\] in layer 1"),
        (lambda rows: torch.where(torch.arange(8) == 3, -1, rows), "-1"),
    ],
)
def test_experts_that_cannot_be_are_named(change: Any, message: str, tmp_path: Path) -> None:
    hf = model(tmp_path)
    rollout = with_experts(make_rollout(tmp_path / "0.pt"), whole=True)
    data = torch.load(rollout, weights_only=True)
    sample = data["groups"][1]["trajectories"][2]["samples"][1]
    sample["routed_experts"] = change(sample["routed_experts"])
    torch.save(data, rollout)
    with pytest.raises(ValueError, match=message) as failure:
        alone(hf, rollout, tmp_path / "never", **ENGINE)
    assert "sample 1 of g1-m2" in str(failure.value)


def test_a_rollout_without_experts_and_a_dense_model_are_refused(tmp_path: Path) -> None:
    rollout = make_rollout(tmp_path / "0.pt")
    with pytest.raises(ValueError, match="no sample of step 0 has routed_experts"):
        alone(model(tmp_path), rollout, tmp_path / "never", **ENGINE)
    with pytest.raises(ValueError, match="qwen3 has no experts"):
        alone(make_hf(tmp_path / "dense"), rollout, tmp_path / "never", **OLD)


def test_rows_of_the_layers_with_experts_alone_are_taken_too() -> None:
    moe = MoeSpec(EXPERTS, TOP, 8, sparse=(False, True, False, True))
    rows = torch.tensor([[0, 0, 1, 2, 0, 0, 3, 0], [0, 0, 0, 3, 0, 0, 2, 1]])
    sample = make_sample("t", 0, 0, torch.tensor([1, 2, 3]), torch.zeros(3))
    for given in (rows, rows[:, [2, 3, 6, 7]]):
        sample.engine_experts = given
        experts = engine_experts(sample, moe)
        assert experts.tolist() == [[[1, 2], [3, 0]], [[0, 3], [2, 1]], [[-1, -1], [-1, -1]]]
