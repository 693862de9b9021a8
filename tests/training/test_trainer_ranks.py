"""Two processes over gloo give what one gives, whichever way the model or the data is split."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import run_ranks, single, weights

OPTIONS = {"global_batch_size": 4, "eps_clip": 0.001, "max_tokens_per_gpu": 60}
COMPARED = ("loss", "pg_loss", "kl_loss", "grad_norm", "train_rollout_logprob_abs_diff", "entropy")


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_model_parallel_size": 2},
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_and_resume_like_one(
    base: Path, rollout: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    with single(base, base, **OPTIONS) as worker:
        want = [worker.train(0, str(rollout)) for _ in range(4)]
        final = weights(worker)
    train = ["train", 0, str(rollout), str(tmp_path / "dump")]
    answers = run_ranks(
        tmp_path / "answers",
        2,
        [
            ["init", str(base), str(base)],
            train,
            train,
            ["save", str(tmp_path / "checkpoint")],
            train,
            train,
            ["export_hf", str(tmp_path / "final")],
        ],
        **layout,
        **OPTIONS,
    )
    got = [answers[i] for i in (1, 2, 4, 5)]
    for a, b in zip(want, got, strict=True):
        for name in COMPARED:
            assert a[name] == pytest.approx(b[name], rel=5e-4, abs=5e-6), name
    exported = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.allclose(final[name], exported[name], atol=5e-5) for name in final)
    dumps = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert dumps == (["rank_0.pt"] if layout else ["rank_0.pt", "rank_1.pt"])
    samples = [
        s
        for p in (tmp_path / "dump").iterdir()
        for s in torch.load(p, weights_only=True)["samples"]
    ]
    assert len(samples) == 16

    with single(tmp_path / "checkpoint", base, **OPTIONS) as worker:
        resumed = [worker.train(0, str(rollout)) for _ in range(2)]
    for a, b in zip(want[2:], resumed, strict=True):
        for name in COMPARED:
            assert a[name] == pytest.approx(b[name], rel=5e-4, abs=5e-6), name
