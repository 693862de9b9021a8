"""One rank: invariance of the update, guards, dumps, and resume."""

import os
from pathlib import Path

import pytest
import torch
from trainer_helpers import VOCAB, make_rollout, single, weights
from transformers import AutoModelForCausalLM

from miles_core.checkpoints import store
from miles_core.training.errors import NonFiniteError
from miles_core.training.sft import run_sft


def after_training(base: Path, rollout: Path, steps: int = 2, **changes: object) -> tuple:
    with single(base, base, **changes) as worker:
        metrics = [worker.train(0, str(rollout)) for _ in range(steps)]
        return metrics, weights(worker)


COMPARED = ("loss", "pg_loss", "kl_loss", "grad_norm", "train_rollout_logprob_abs_diff", "entropy")


def assert_same(one: tuple, other: tuple) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        for name in COMPARED:
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=2e-6), name
    for name, value in one[1].items():
        assert torch.allclose(value, other[1][name], atol=2e-5), name


@pytest.mark.parametrize("aggregation", ["trajectory", "token"])
def test_micro_batches_and_splitting_do_not_change_the_update(
    base: Path, rollout: Path, tmp_path: Path, aggregation: str
) -> None:
    options = {"loss_aggregation": aggregation, "eps_clip": 0.001, "global_batch_size": 4}
    one = after_training(base, rollout, **options)
    assert one[0][0]["optimizer_steps"] == 2 and one[0][1]["kl_loss"] > 0
    assert_same(one, after_training(base, rollout, max_tokens_per_gpu=45, **options))
    split = make_rollout(tmp_path / "split.pt", split=True)
    assert_same(one, after_training(base, split, max_tokens_per_gpu=90, **options))


def test_a_changed_rollout_changes_the_update(base: Path, rollout: Path, tmp_path: Path) -> None:
    other = make_rollout(tmp_path / "other.pt", seed=1)
    with pytest.raises(AssertionError):
        assert_same(after_training(base, rollout), after_training(base, other))


def test_dump_holds_the_log_probabilities_of_the_old_weights(
    base: Path, hf_model: Path, rollout: Path, tmp_path: Path
) -> None:
    with single(base, base) as worker:
        metrics = worker.train(0, str(rollout), str(tmp_path / "0"))
    samples = torch.load(tmp_path / "0" / "rank_0.pt", weights_only=True)["samples"]
    reference = AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    differences = []
    for sample in samples:
        tokens, mask = sample["tokens"], sample["loss_mask"].bool()
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0] / 0.8
        want = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0]
        for name in ("old", "current", "ref"):
            got = sample[f"{name}_logprobs"]
            assert torch.allclose(got[1:][mask[1:]], want[mask[1:]], atol=1e-4)
            assert not got[~mask].any()
        differences.append((want - sample["rollout_logprobs"][1:])[mask[1:]].abs())
    assert len(samples) == 16 and {s["trial_id"] for s in samples} >= {"g0-m0", "g1-m3"}
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(
        torch.cat(differences).mean().item(), rel=1e-3
    )


def test_losses_after_a_resume_are_those_of_the_uninterrupted_run(
    base: Path, tmp_path: Path
) -> None:
    files = [make_rollout(tmp_path / f"{i}.pt", step=i, seed=i) for i in range(5)]
    options = {"lr_warmup_steps": 4, "global_batch_size": 4}
    with single(base, base, **options) as worker:
        for i in (0, 1):
            worker.train(i, str(files[i]))
        directory = store.begin(tmp_path / "ck", 2)
        worker.save(str(directory))
        store.publish(directory, tmp_path / "ck", 2, {"weight_version": 7}, keep=2)
        want = [worker.train(i, str(files[i])) for i in (2, 3, 4)]
        last = weights(worker)
    checkpoint = store.latest(tmp_path / "ck")
    assert checkpoint is not None
    torch.manual_seed(99)
    with single(checkpoint.path, base, **options) as worker:
        got = [worker.train(i, str(files[i])) for i in (2, 3, 4)]
        resumed = weights(worker)
    for a, b in zip(want, got, strict=True):
        assert {n: a[n] for n in (*COMPARED, "lr")} == {n: b[n] for n in (*COMPARED, "lr")}
    assert all(torch.equal(last[name], resumed[name]) for name in last)


def test_an_own_checkpoint_tells_its_iteration(base: Path, rollout: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from trainer_helpers import CONFIG

    from miles_core.training.worker import TrainerWorker

    with single(base, kl_loss_coef=0.0) as worker:
        directory = store.begin(tmp_path, 3)
        worker.save(str(directory))
    path = store.publish(directory, tmp_path, 3, {"weight_version": 4}, keep=1)
    worker = TrainerWorker(replace(CONFIG, kl_loss_coef=0.0))
    try:
        answer = worker.init(str(path))
    finally:
        worker.close()
    assert answer == {"iteration": 3, "state": {"weight_version": 4, "iteration": 3}}


def poisoned(path: Path, source: Path) -> Path:
    data = torch.load(source, weights_only=True)
    sample = data["groups"][1]["trajectories"][2]["samples"][0]
    sample["logprobs"] = torch.full_like(sample["logprobs"], float("nan"))
    torch.save(data, path)
    return path


def test_a_non_finite_step_is_not_applied_and_too_many_end_the_run(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    bad = poisoned(tmp_path / "bad.pt", rollout)
    with single(base, base, use_tis=True, max_nonfinite_steps=1) as worker:
        before = weights(worker)
        metrics = worker.train(0, str(bad))
        after = weights(worker)
        assert metrics["optimizer_steps"] == 0 and metrics["nonfinite_steps"] == 1
        assert metrics["nonfinite"][0] == "loss, from rollout log-probabilities of g1-m2"
        assert any("gradient of" in line for line in metrics["nonfinite"])
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert worker.train(0, str(rollout))["optimizer_steps"] == 1
        with pytest.raises(NonFiniteError, match="max_nonfinite_steps"):
            worker.train(0, str(bad))


def test_what_does_not_fit_is_refused(base: Path, rollout: Path, hf_model: Path) -> None:
    with pytest.raises(ValueError, match="ref_load"), single(base):
        pass
    with pytest.raises(FileNotFoundError, match="convert"), single(hf_model, base):
        pass
    with single(base, base) as worker, pytest.raises(ValueError, match="step 0, not 1"):
        worker.train(1, str(rollout))
    with single(base, base, max_tokens_per_gpu=8) as worker, pytest.raises(ValueError, match="fit"):
        worker.train(0, str(rollout))


def test_exported_weights_are_the_trained_ones(base: Path, rollout: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights" / "v1"
    with single(base, base) as worker:
        worker.train(0, str(rollout))
        for _ in range(2):
            worker.export_hf(str(out))
        tokens = torch.randint(0, VOCAB, (20,))
        want = worker.log_probs(tokens.tolist())
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens[None]).logits[0, :-1] / 0.8, -1)
    assert torch.allclose(logp.gather(1, tokens[1:, None])[:, 0], want[1:], atol=1e-5)
    assert [p.name for p in out.parent.iterdir()] == ["v1"]


def test_supervised_training_learns_and_stops_when_told(hf_model: Path, tmp_path: Path) -> None:
    text = torch.randint(0, VOCAB, (24,)).tolist()
    batch = [{"tokens": text, "loss_mask": [0] * 4 + [1] * 20}]
    seen: list[float] = []

    def on_step(step: int, loss: float, worker: object) -> bool:
        seen.append(worker.log_probs(text)[4:].mean().item())  # type: ignore[attr-defined]
        return step == 12

    result = run_sft(
        str(hf_model),
        str(tmp_path / "out"),
        [batch] * 30,
        lr=1e-2,
        steps=30,
        on_step=on_step,
        warmup_steps=0,
    )
    assert result.stopped and len(result.losses) == 12
    assert result.losses[1] == pytest.approx(-seen[0], abs=1e-4)
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_worker_that_is_closed_leaves_no_threads(base: Path, rollout: Path) -> None:
    """Threads of gloo's groups wake up all the time; hundreds of them starve a process."""

    def threads_after_one() -> int:
        with single(base, base) as worker:
            worker.train(0, str(rollout))
        return len(os.listdir("/proc/self/task"))

    before = threads_after_one()
    after = [threads_after_one() for _ in range(3)]
    # Megatron keeps its newest rotary embeddings, and each of them one small group.
    assert max(after) - before <= 12, (before, after)
