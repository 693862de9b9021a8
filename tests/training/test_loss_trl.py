"""The loss against TRL's GRPOTrainer on the same log-probabilities, where TRL is installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_core.training.importance import ImportanceSettings, importance_weights
from miles_core.training.losses import LossSettings, TokenData, policy_loss, token_weights

pytest.importorskip("trl")
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

BATCH, LENGTH = 6, 17
LOW, HIGH = 0.1, 0.15
AGGREGATIONS = {
    "grpo": "trajectory",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
}


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x

    gather = gather_for_metrics = staticmethod(lambda x: x)


class Numbers:
    """Log-probabilities [BATCH, LENGTH] of sequences of different lengths, with gaps."""

    def __init__(self, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(BATCH, LENGTH, generator=dice, dtype=torch.float64)

        lengths = torch.randint(3, LENGTH + 1, (BATCH, 1), generator=dice)
        self.completion = (torch.arange(LENGTH) < lengths).long()
        self.tool = (torch.rand(BATCH, LENGTH, generator=dice) < 0.8).long()
        self.mask = (self.completion * self.tool).bool()
        self.log_probs = -normal(1.0).abs() - 0.1
        self.old = self.log_probs + normal(0.2)
        self.ref = self.log_probs + normal(0.5)
        self.rollout = self.old + normal(0.3)
        self.entropy = normal(1.0).abs()
        self.advantages = torch.randn(BATCH, generator=dice, dtype=torch.float64)

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_probs.clone().requires_grad_(), self.entropy.clone().requires_grad_()


def theirs(numbers: Numbers, loss_type: str, ratio: torch.Tensor | None, **options: Any) -> Any:
    """(loss, gradients) of GRPOTrainer's own loss, called without a trainer."""
    log_probs, entropy = numbers.leaves()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_probs, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("level", "token"),
        beta=options.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("unbiased", False),
            delta=options.get("delta"),
            steps_per_generation=1,
        ),
        loss_type=loss_type,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        model=torch.nn.Linear(1, 1).train(),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        accelerator=Accelerator(),
        _entropy_bonus_enabled=options.get("entropy_coef", 0.0) > 0,
        use_adaptive_entropy=False,
        entropy_coef=options.get("entropy_coef", 0.0),
        _metrics={"train": {name: [] for name in METRICS}},
    )
    inputs = {
        "prompt_ids": torch.zeros(BATCH, 1, dtype=torch.long),
        "prompt_mask": torch.ones(BATCH, 1, dtype=torch.long),
        "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
        "completion_mask": numbers.completion,
        "tool_mask": numbers.tool,
        "advantages": numbers.advantages,
        "old_per_token_logps": numbers.old,
        "ref_per_token_logps": numbers.ref,
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": numbers.mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items() if values}
    return loss, log_probs.grad, entropy.grad, metrics


METRICS = (
    "kl",
    "entropy",
    "entropy_coef",
    "policy_loss",
    *(f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max")),
    "clip_ratio/region_mean",
)


def ours(numbers: Numbers, loss_type: str, ratio: torch.Tensor | None, **options: Any) -> Any:
    log_probs, entropy = numbers.leaves()
    mask = numbers.mask
    counts = mask.sum(1)
    rows = torch.repeat_interleave(torch.arange(BATCH), counts)
    weights = token_weights(AGGREGATIONS[loss_type], counts.tolist(), LENGTH)  # type: ignore[arg-type]
    with torch.no_grad():
        sequence = ((log_probs - numbers.old) * mask).sum(1) / counts
    data = TokenData(
        advantages=numbers.advantages[rows],
        weights=torch.tensor(weights, dtype=torch.float64)[rows],
        old=numbers.old[mask],
        ref=numbers.ref[mask] if options.get("beta") else None,
        tis=None if ratio is None else ratio.expand(BATCH, LENGTH)[mask],
        sequence_log_ratio=sequence[rows] if options.get("level") == "sequence" else None,
        entropy=entropy[mask] if options.get("entropy_coef") else None,
    )
    settings = LossSettings(
        LOW,
        HIGH,
        dual_clip=options.get("delta"),
        kl_coef=options.get("beta", 0.0),
        kl_type="k3",
        unbiased_kl=options.get("unbiased", False),
        entropy_coef=options.get("entropy_coef", 0.0),
    )
    loss, sums = policy_loss(log_probs[mask], data, settings)
    loss.backward()
    return loss, log_probs.grad, entropy.grad, sums


def assert_equal(loss_type: str, ratio_of: Any = None, **options: Any) -> None:
    for seed in range(3):
        numbers = Numbers(seed)
        ratio = None if ratio_of is None else ratio_of(numbers)
        got, want = (f(numbers, loss_type, ratio, **options) for f in (ours, theirs))
        assert got[0].item() == pytest.approx(want[0].item(), rel=1e-9)
        assert torch.allclose(got[1], want[1], rtol=1e-9, atol=1e-12)
        assert got[1].abs().sum() > 0
        if options.get("entropy_coef"):
            assert torch.allclose(got[2], want[2], rtol=1e-9, atol=1e-12)
        for name, key in (("low", "low_mean"), ("high", "high_mean"), ("", "region_mean")):
            if loss_type in ("bnpo", "dapo") and options.get("level") != "sequence":
                mine = got[3]["pg_clipfrac" + (f"_{name}" if name else "")].item()
                assert mine == pytest.approx(want[3][f"clip_ratio/{key}"], abs=1e-6)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"level": "sequence"},
        {"beta": 0.3},
        {"beta": 0.3, "unbiased": True},
        {"delta": 1.3},
        {"level": "sequence", "beta": 0.1, "delta": 1.2},
    ],
    ids=["plain", "gspo", "kl", "unbiased kl", "two-sided clip", "gspo, kl, two-sided clip"],
)
def test_loss_and_gradient_are_those_of_trl(loss_type: str, options: dict[str, Any]) -> None:
    assert_equal(loss_type, **options)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_the_entropy_bonus_is_that_of_trl(loss_type: str) -> None:
    """TRL takes its mean over all tokens, whatever the rest of the loss does; so does `token`."""
    assert_equal(loss_type, entropy_coef=0.2)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_enter_the_loss_as_in_trl(loss_type: str, mode: Any, level: Any) -> None:
    def ratio(numbers: Numbers) -> torch.Tensor:
        log_rho = (numbers.old - numbers.rollout) * numbers.mask
        if level == "sequence":
            log_rho = log_rho.sum(1, keepdim=True)
        return importance_weights(log_rho, ImportanceSettings(mode, level, 0.5, 1.5))

    assert_equal(loss_type, ratio)
