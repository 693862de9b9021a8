"""PPO on a model: the critic learns, goes on after a resume, and leaves the rest as it was."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import VOCAB, make_rollout, single, weights

from miles_core.checkpoints import store
from miles_core.checkpoints.contents import contents
from miles_core.checkpoints.export import export_to_hf
from miles_core.training.gae import gae
from miles_core.training.worker import TrainerWorker

PPO: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "lambd": 0.95,
    "critic_lr": 1e-2,
    "critic_lr_warmup_steps": 2,
    "global_batch_size": 4,
    "kl_loss_coef": 0.0,
}


def saved(worker: TrainerWorker, root: Path, step: int) -> Path:
    directory = store.begin(root, step)
    worker.save(str(directory))
    return store.publish(directory, root, step, {"cursor": {}}, keep=9)


def critic_weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    critic = worker._critic
    assert critic is not None
    return {name: value.detach().clone() for name, value in critic.model.named_parameters()}


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    timed = ("seconds", "tokens_per_second", "actor_train_tflops")
    return {name: value for name, value in metrics.items() if not name.startswith(timed)}


def rewarded_by_a_token(path: Path, step: int) -> Path:
    """Trajectories whose reward, -1 or 1, is what their first token says."""
    make_rollout(path, step=step, seed=step)
    data = torch.load(path, weights_only=True)
    for group in data["groups"]:
        for number, trajectory in enumerate(group["trajectories"]):
            trajectory["reward"] = 1.0 if number % 2 else -1.0
            for sample in trajectory["samples"]:
                sample["tokens"][0] = VOCAB - 1 - number % 2
    torch.save(data, path)
    return path


def test_the_critic_learns_what_decides_the_reward(base: Path, tmp_path: Path) -> None:
    """Also on trajectories that it was not trained on: values are compared before each step."""
    with single(base, **{**PPO, "lambd": 1.0, "value_clip": 1.0, "critic_lr": 3e-3}) as worker:
        metrics = [
            worker.train(i, str(rewarded_by_a_token(tmp_path / f"{i}.pt", i))) for i in range(12)
        ]
    early, late = metrics[:3], metrics[-3:]
    assert sum(m["value_loss"] for m in late) < 0.3 * sum(m["value_loss"] for m in early)
    assert early[0]["value_explained_variance"] < 0.1
    assert all(m["value_explained_variance"] > 0.8 for m in late)
    assert all(abs(m["return_mean"]) < 0.3 for m in metrics)


def test_values_are_those_of_the_state_before_each_token(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    """A value sees neither its token nor what comes later; the dump holds what GAE makes of it."""
    with single(base, **PPO) as worker:
        worker.train(0, str(rollout), str(tmp_path / "0"))
        data = torch.load(rollout, weights_only=True)
        for group in data["groups"]:
            for trajectory in group["trajectories"]:
                for sample in trajectory["samples"]:
                    sample["tokens"][10:] = (sample["tokens"][10:] + 1) % VOCAB
        torch.save(data, tmp_path / "changed.pt")
    with single(base, **PPO) as worker:
        worker.train(0, str(tmp_path / "changed.pt"), str(tmp_path / "1"))
    first, second = (
        torch.load(tmp_path / str(i) / "rank_0.pt", weights_only=True)["samples"] for i in (0, 1)
    )
    for a, b in zip(first, second, strict=True):
        mask = a["loss_mask"].bool()
        assert torch.allclose(a["values"][:11], b["values"][:11], atol=1e-6)
        assert not mask[11:].any() or not torch.allclose(a["values"][11:], b["values"][11:])
        assert not a["values"][~mask].any() and not a["returns"][~mask].any()
    rewards = {
        t["trial_id"]: t["reward"]
        for g in torch.load(rollout, weights_only=True)["groups"]
        for t in g["trajectories"]
    }
    for trial, reward in rewards.items():
        own = sorted(
            (s for s in first if s["trial_id"] == trial), key=lambda s: int(s["sample_index"])
        )
        masks = [s["loss_mask"].bool() for s in own]
        values, returns = (
            torch.cat([s[name][m] for s, m in zip(own, masks, strict=True)]).tolist()
            for name in ("values", "returns")
        )
        want = gae([0.0] * (len(values) - 1) + [reward], values, 1.0, 0.95)[1]
        assert returns == pytest.approx(want, abs=1e-5)


def test_a_resume_is_bit_for_bit_the_uninterrupted_run(base: Path, tmp_path: Path) -> None:
    files = [make_rollout(tmp_path / f"{i}.pt", step=i, seed=i) for i in range(5)]
    with single(base, **PPO) as worker:
        want = [worker.train(i, str(files[i])) for i in range(5)]
        final, final_critic = weights(worker), critic_weights(worker)
    with single(base, **PPO) as worker:
        assert [timeless(worker.train(i, str(files[i]))) for i in (0, 1)] == [
            timeless(m) for m in want[:2]
        ]
        checkpoint = saved(worker, tmp_path / "checkpoints", 2)
    torch.manual_seed(123)
    with single(checkpoint, **PPO) as worker:
        got = [worker.train(i, str(files[i])) for i in range(2, 5)]
        assert [timeless(m) for m in got] == [timeless(m) for m in want[2:]]
        assert all(torch.equal(final[name], value) for name, value in weights(worker).items())
        for name, value in critic_weights(worker).items():
            assert torch.equal(final_critic[name], value), name


def test_what_the_commands_say_of_such_a_checkpoint(
    base: Path, hf_model: Path, rollout: Path, tmp_path: Path
) -> None:
    """Both models with their optimizers; an export is the policy."""
    with single(base, **PPO) as worker:
        worker.train(0, str(rollout))
        checkpoint = saved(worker, tmp_path / "checkpoints", 1)
        policy = weights(worker)
    assert store.verify(checkpoint) is None
    sections = {s.name: s for s in contents(checkpoint).sections}
    assert list(sections) == [
        "model",
        "optimizer",
        "critic",
        "critic.optimizer",
        "random",
        "objects",
    ]
    assert sections["critic"].values == sections["model"].values + 32  # the value head
    assert sections["critic.optimizer"].values == 3 * sections["critic"].values
    assert sections["objects"].entries == 2 * contents(base).sections[-1].entries
    export_to_hf(checkpoint, tmp_path / "hf")
    exported, source = (load_file(d / "model.safetensors") for d in (tmp_path / "hf", hf_model))
    assert set(exported) == set(source)
    assert all(torch.equal(policy[name], value) for name, value in exported.items())


def test_a_critic_starts_from_the_policy_or_from_another_critic(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    with single(base, **PPO) as worker:
        fresh = critic_weights(worker)
        own = dict(worker.policy.model.named_parameters())
        assert all(torch.equal(own[n], fresh[n]) for n in own.keys() & fresh.keys())
        assert 0.01 < fresh["output_layer.weight"].std() < 0.03
        worker.train(0, str(rollout))
        trained = critic_weights(worker)
        checkpoint = saved(worker, tmp_path / "checkpoints", 1)
    worker = TrainerWorker(worker._config)
    try:
        worker.init(str(base), critic_load=str(checkpoint))
        assert all(torch.equal(trained[n], v) for n, v in critic_weights(worker).items())
        assert worker._critic is not None and worker._critic.optimizer.steps == 0
        with pytest.raises(FileNotFoundError, match="critic_load: .*absent"):
            worker.init(str(base), critic_load=str(tmp_path / "absent"))
    finally:
        worker.close()
    with single(base, kl_loss_coef=0.0) as worker:
        other = saved(worker, tmp_path / "other", 1)
    with pytest.raises(ValueError, match="holds no critic"), single(other, **PPO):
        pass


def test_first_steps_train_the_critic_alone(base: Path, tmp_path: Path) -> None:
    files = [make_rollout(tmp_path / f"{i}.pt", step=i) for i in range(2)]
    with single(base, num_critic_only_steps=1, **PPO) as worker:
        before, critic = weights(worker), critic_weights(worker)
        first = worker.train(0, str(files[0]))
        assert all(torch.equal(before[n], value) for n, value in weights(worker).items())
        assert any(not torch.equal(critic[n], v) for n, v in critic_weights(worker).items())
        assert first["critic_optimizer_steps"] == 2 and "loss" not in first
        second = worker.train(1, str(files[1]))
        assert second["optimizer_steps"] == 2 and math.isfinite(second["loss"])
        assert any(not torch.equal(before[n], value) for n, value in weights(worker).items())


def test_bfloat16_goes_on_from_its_float32_copies(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    half = {**PPO, "dtype": "bfloat16"}
    with single(base, **PPO) as worker:
        want = worker.train(0, str(rollout))
    with single(base, **half) as worker:
        first = worker.train(0, str(rollout))
        checkpoint = saved(worker, tmp_path, 1)
        again = worker.train(0, str(rollout))
    assert first["value_loss"] == pytest.approx(want["value_loss"], rel=0.1)
    with single(checkpoint, **half) as worker:
        assert timeless(worker.train(0, str(rollout))) == timeless(again)


def test_a_policy_of_adapters_beside_a_whole_critic(
    base: Path, rollout: Path, tmp_path: Path
) -> None:
    options = {**PPO, "lora_rank": 4}
    with single(base, **options) as worker:
        before = critic_weights(worker)
        worker.train(0, str(rollout))
        checkpoint = saved(worker, tmp_path, 1)
        again = worker.train(0, str(rollout))
        assert all(not torch.equal(before[n], v) for n, v in critic_weights(worker).items())
    with single(checkpoint, base, **options) as worker:
        assert timeless(worker.train(0, str(rollout))) == timeless(again)


def test_a_value_that_is_not_finite_stops_both_updates(base: Path, rollout: Path) -> None:
    with single(base, **PPO) as worker:
        assert worker._critic is not None
        before, outputs = weights(worker), worker._critic._outputs

        def broken(*args: Any) -> torch.Tensor:
            return outputs(*args) * float("nan")

        worker._critic._outputs = broken  # type: ignore[method-assign]
        metrics = worker.train(0, str(rollout))
        assert all(torch.equal(before[n], value) for n, value in weights(worker).items())
    assert metrics["critic_optimizer_steps"] == metrics["optimizer_steps"] == 0
    assert "values of g0-m0" in metrics["critic_nonfinite"][0]
    assert "values of the critic of g0-m0" in metrics["nonfinite"][0]


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_the_engines_log_probabilities_save_a_pass(
    base: Path, rollout: Path, estimator: str
) -> None:
    options = {**PPO, "advantage_estimator": estimator, "critic_lr": None, "eps_clip_high": 0.25}
    with single(base, **options) as worker:
        recorded = worker.train(0, str(rollout))
    with single(base, use_rollout_logprobs=True, **options) as worker:
        taken = worker.train(0, str(rollout))
    assert "seconds_old" in recorded and "seconds_old" not in taken and "entropy" not in taken
    assert recorded["ratio"] == pytest.approx(1, abs=0.1) and abs(taken["ratio"] - 1) > 0.5
    assert taken["trained_tokens"] == recorded["trained_tokens"]
    with single(base, use_rollout_logprobs=True, **{**options, "global_batch_size": 8}) as worker:
        whole = worker.train(0, str(rollout))
    for name in ("train_rollout_logprob_abs_diff", "train_rollout_kl"):
        assert whole[name] == pytest.approx(recorded[name], rel=1e-4)
        assert taken[name] != whole[name]  # over the first optimizer step's trajectories alone
