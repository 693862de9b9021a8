"""A trainer of adapters: what moves and what does not, its reference, and an exact resume."""

import shutil
from pathlib import Path

import pytest
import torch
from test_trainer_worker import poisoned
from trainer_helpers import make_hf, make_rollout, run_ranks, single, weights

from miles_core.checkpoints import adapters, store
from miles_core.checkpoints.contents import contents
from miles_core.checkpoints.convert import convert_to_torch_dist
from miles_core.training.worker import TrainerWorker

LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 5e-3, "global_batch_size": 4}
COMPARED = ("loss", "grad_norm", "kl_loss", "lr", "entropy")


def save(worker: TrainerWorker, root: Path, iteration: int) -> Path:
    directory = store.begin(root, iteration)
    worker.save(str(directory))
    return store.publish(directory, root, iteration, {"weight_version": iteration + 1}, keep=9)


def frozen(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in worker.policy.model.stored_tensors()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_trained_and_held_by_the_optimizer(
    dtype: str, base: Path, rollout: Path
) -> None:
    with single(base, dtype=dtype, **LORA) as worker:
        policy = worker.policy
        before, served = frozen(worker), weights(worker)
        metrics = worker.train(0, str(rollout))
        assert metrics["optimizer_steps"] == 2 and metrics["grad_norm"] > 0
        after = frozen(worker)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        tensors = list(policy.model.lora.tensors())
        assert all(bool(t.value.any()) for t in tensors)
        moved = {n for n, v in weights(worker).items() if not torch.equal(v, served[n])}
        assert moved == {f"{module}.weight" for module in policy.model.lora.modules}
        stream = worker.weights.stream(changed_only=True)
        assert moved == {entry.name for bucket in stream.buckets for entry in bucket}

        values = sum(t.value.numel() for t in tensors)
        wrapped = policy.optimizer.wrapped
        assert wrapped.expert_parallel_buffers == []
        assert sum(b.grad_data.numel() for b in wrapped.buffers) < 1.1 * values
        states = [
            state
            for part in policy.optimizer._inner.chained_optimizers
            for state in part.optimizer.state.values()
        ]
        assert len(states) == len(tensors) == 28
        assert sum(state["exp_avg"].numel() for state in states) == values
        for name, parameter in policy.model.named_parameters():
            assert hasattr(parameter, "main_grad") == (".adapter." in name)
            assert parameter.grad is None


def test_the_reference_is_the_model_without_adapters(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    """Its log-probabilities are those of the untrained model, and no second set of weights is
    held for them."""
    with single(base, kl_loss_coef=0.0, global_batch_size=4) as worker:
        worker.train(0, str(rollout), str(tmp_path / "plain"))
    with single(base, **LORA) as worker:
        first = worker.train(0, str(rollout))
        second = worker.train(0, str(rollout), str(tmp_path / "adapted"))
        assert worker.policy._reference is None
    assert second["kl_loss"] > first["kl_loss"] > 0
    plain, adapted = (
        torch.load(tmp_path / name / "rank_0.pt", weights_only=True)["samples"]
        for name in ("plain", "adapted")
    )
    for a, b in zip(plain, adapted, strict=True):
        assert torch.equal(a["old_logprobs"], b["ref_logprobs"])
    assert any(not torch.equal(s["old_logprobs"], s["ref_logprobs"]) for s in adapted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_exact_and_the_model_is_not_written_again(
    dtype: str, base: Path, tmp_path: Path
) -> None:
    files = [make_rollout(tmp_path / f"{i}.pt", step=i, seed=i) for i in range(5)]
    options = {**LORA, "lr_warmup_steps": 4, "dtype": dtype}
    with single(base, base, **options) as worker:
        for i in (0, 1):
            worker.train(i, str(files[i]))
        path = save(worker, tmp_path / "checkpoints", 2)
        want = [worker.train(i, str(files[i])) for i in (2, 3, 4)]
        last = weights(worker)
    torch.manual_seed(99)
    with single(path, base, **options) as worker:
        got = [worker.train(i, str(files[i])) for i in (2, 3, 4)]
        resumed = weights(worker)
    for a, b in zip(want, got, strict=True):
        assert {name: a[name] for name in COMPARED} == {name: b[name] for name in COMPARED}
    assert all(torch.equal(last[name], resumed[name]) for name in last)
    sections = {section.name: section for section in contents(path).sections}
    assert sections["adapters"].entries == 28 and "model" not in sections
    assert sections["optimizer"].values == 3 * sections["adapters"].values


def test_two_ranks_go_on_from_one_and_one_from_two(base: Path, tmp_path: Path) -> None:
    files = [make_rollout(tmp_path / f"{i}.pt", step=i, seed=i) for i in range(4)]
    with single(base, **LORA) as worker:
        first = [worker.train(i, str(files[i])) for i in (0, 1)]
        path = save(worker, tmp_path / "one", 2)
        want = first + [worker.train(i, str(files[i])) for i in (2, 3)]
    layout = {"tensor_model_parallel_size": 2}
    steps = [["train", i, str(files[i])] for i in (2, 3)]
    calls = [["init", str(path)], steps[0], ["save", str(tmp_path / "two")], steps[1]]
    answers = run_ranks(tmp_path / "answers", 2, calls, **layout, **LORA)
    with single(tmp_path / "two", **LORA) as worker:
        again = worker.train(3, str(files[3]))
    for name in COMPARED:
        assert answers[1][name] == pytest.approx(want[2][name], rel=1e-4, abs=1e-6), name
        assert answers[3][name] == pytest.approx(want[3][name], rel=1e-4, abs=1e-6), name
        assert again[name] == pytest.approx(want[3][name], rel=1e-4, abs=1e-6), name


def test_what_does_not_belong_together_is_refused(
    base: Path, hf_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    convert_to_torch_dist(make_hf(tmp_path / "hf", tied=False), other)
    with single(base, **LORA) as worker:
        path = save(worker, tmp_path / "adapted", 1)
    with single(base, kl_loss_coef=0.0) as worker:
        whole = save(worker, tmp_path / "whole", 1)
    refused = [
        (base, other, LORA, "not the model that the adapters"),
        (path, other, LORA, "not the model that the adapters"),
        (path, tmp_path / "absent", LORA, "not there"),
        (whole, None, LORA, "not a converted model"),
        (path, None, {"kl_loss_coef": 0.0}, "set lora_rank"),
        (path, None, {**LORA, "lora_rank": 8}, "saved with lora_rank 4, not 8"),
        (path, None, {**LORA, "lora_alpha": 4.0}, "saved with lora_alpha 16.0, not 4.0"),
        (path, None, {**LORA, "target_modules": ("q_proj",)}, "saved with target_modules"),
        (base, None, {**LORA, "target_modules": ("q_prj",)}, "did you mean q_proj"),
    ]
    for load, ref, options, message in refused:
        with pytest.raises(ValueError, match=message), single(load, ref, **options):
            pass


def test_the_model_may_be_another_conversion_of_the_same_source(
    base: Path, hf_model: Path, rollout: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    with single(copy, **LORA) as worker:
        worker.train(0, str(rollout))
        path = save(worker, tmp_path / "checkpoints", 1)
        want = weights(worker)
    assert adapters.read(path).base == str(copy)
    shutil.rmtree(copy)
    with pytest.raises(ValueError, match=f"{copy}, which is not there"), single(path, **LORA):
        pass
    for model in (base, hf_model):
        with single(path, model, **LORA) as worker:
            got = weights(worker)
        assert all(torch.equal(value, got[name]) for name, value in want.items())


def test_supervised_training_of_adapters_learns(base: Path) -> None:
    text = torch.randint(0, 96, (24,)).tolist()
    batch = [{"tokens": text, "loss_mask": [0] * 4 + [1] * 20}]
    with single(base, **{**LORA, "lr": 3e-2}) as worker:
        losses = worker.sft([batch] * 20)["losses"]
        assert losses[-1] < 0.5 * losses[0]


def test_a_gradient_that_is_not_finite_is_named(base: Path, rollout: Path, tmp_path: Path) -> None:
    bad = poisoned(tmp_path / "bad.pt", rollout)
    with single(base, use_tis=True, **{**LORA, "global_batch_size": 8}) as worker:
        metrics = worker.train(0, str(bad))
    assert metrics["optimizer_steps"] == 0
    named = str(metrics["nonfinite"])
    assert "gradient of 28 parameters" in named and "linear_qkv.adapter.lora_A.k_proj" in named
