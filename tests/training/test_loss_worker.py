"""The variants whose numbers cross samples, on a model: the cut of the work must not show."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import make_rollout, run_ranks, single, weights

SKIPPED = (
    "seconds_",
    "tokens_per_second",
    "actor_train_tflops",
    "dp_imbalance",
    "samples",
    "nonfinite",
    "step",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "gspo": {
        "advantage_estimator": "gspo",
        "eps_clip": 0.003,
        "eps_clip_high": 0.004,
        "use_tis": True,
        "tis_mode": "mis",
        "tis_level": "geometric",
        "tis_clip": 1.3,
        "loss_aggregation": "token",
    },
    "reinforce++": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_loss_coef": 0.0,
        "kl_coef": 0.1,
        "kl_loss_type": "k1",
        "entropy_coef": 0.02,
    },
    "rloo": {
        "advantage_estimator": "rloo",
        "kl_loss_coef": 0.0,
        "kl_coef": 0.1,
        "use_tis": True,
        "tis_level": "sequence",
        "loss_aggregation": "constant",
        "loss_constant_length": 50,
    },
}


def trained(base: Path, rollout: Path, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    with single(base, base, global_batch_size=2, **changes) as worker:
        metrics = [worker.train(0, str(rollout)) for _ in range(2)]
        return metrics, weights(worker)


def assert_same(one: list[Any], other: list[Any], rel: float) -> None:
    for a, b in zip(one, other, strict=True):
        assert set(a) == set(b)
        for name in a:
            if not name.startswith(SKIPPED):
                assert a[name] == pytest.approx(b[name], rel=rel, abs=5e-6), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_and_micro_batches_do_not_show(
    base: Path, rollout: Path, tmp_path: Path, variant: str
) -> None:
    options = VARIANTS[variant]
    metrics, final = trained(base, rollout, **options)
    assert metrics[1]["optimizer_steps"] == 4 and metrics[1]["grad_norm"] > 0
    split = make_rollout(tmp_path / "split.pt", split=True)
    for path, limit in ((rollout, 45), (split, 45), (split, 4096)):
        other, other_final = trained(base, path, max_tokens_per_gpu=limit, **options)
        assert_same(metrics, other, rel=5e-4)
        for name, value in final.items():
            assert torch.allclose(value, other_final[name], atol=5e-5), name


def test_options_change_the_update(base: Path, rollout: Path) -> None:
    plain = trained(base, rollout)[1]
    for options in VARIANTS.values():
        changed = trained(base, rollout, **options)[1]
        assert any((plain[name] - changed[name]).abs().max() > 1e-4 for name in plain)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("gspo", {}),
        ("reinforce++", {}),
        pytest.param("rloo", {}, marks=pytest.mark.slow),
        *(
            pytest.param(variant, {f"{kind}_parallel_size": 2}, marks=pytest.mark.slow)
            for variant in VARIANTS
            for kind in ("tensor_model", "pipeline_model", "context")
        ),
    ],
)
def test_ranks_do_not_show(
    base: Path, rollout: Path, tmp_path: Path, variant: str, layout: dict[str, int]
) -> None:
    options = {**VARIANTS[variant], "max_tokens_per_gpu": 60}
    want = trained(base, rollout, **options)[0]
    split = make_rollout(tmp_path / "split.pt", split=True)
    answers = run_ranks(
        tmp_path / "answers",
        2,
        [["init", str(base), str(base)], *[["train", 0, str(split)]] * 2],
        global_batch_size=2,
        **layout,
        **options,
    )
    assert_same(want, answers[1:], rel=1e-3)


def test_the_value_that_is_not_finite_is_found_behind_sums_over_a_trajectory(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    data = torch.load(rollout, weights_only=True)
    sample = data["groups"][1]["trajectories"][2]["samples"][0]
    sample["logprobs"] = torch.full_like(sample["logprobs"], float("-inf"))
    torch.save(data, tmp_path / "bad.pt")
    with single(base, base, **VARIANTS["gspo"]) as worker:
        before = weights(worker)
        metrics = worker.train(0, str(tmp_path / "bad.pt"))
        assert all(torch.equal(before[n], value) for n, value in weights(worker).items())
    assert metrics["optimizer_steps"] == 0 and metrics["nonfinite_steps"] == 1
    assert "rollout log-probabilities of g1-m2" in metrics["nonfinite"][0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_trial(
    base: Path, rollout: Path, tmp_path: Path, reward: float
) -> None:
    data = torch.load(rollout, weights_only=True)
    data["groups"][0]["trajectories"][1]["reward"] = reward
    torch.save(data, tmp_path / "bad.pt")
    with single(base, base) as worker, pytest.raises(ValueError, match="reward of g0-m1"):
        worker.train(0, str(tmp_path / "bad.pt"))
