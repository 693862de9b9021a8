"""The trainers that `benchmarks/trainer.py` compares.

Each takes the same GRPO step: log-probabilities of the old weights, importance weights that
correct for the engine (token level, truncated), the clipped loss as a mean per trajectory, its
gradients, their clipping, and AdamW without weight decay on the norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from trainer_batches import (
    BETAS,
    CAP,
    CLIP_NORM,
    EPS_HIGH,
    EPS_LOW,
    LR,
    TIS_CLIP,
    WEIGHT_DECAY,
    Padded,
    padded_micro_batches,
)


class Contestant(Protocol):
    """A trainer with a model; `step` trains on the batch of `prepare`: (loss, gradient norm)."""

    def prepare(self, model: Path, rollout: Path) -> None: ...

    def step(self) -> tuple[float, float]: ...


class Ours:
    """`TrainerWorker`, one rank, in this process."""

    def __init__(self) -> None:
        import miles_core.training.worker  # noqa: F401 - the import is not what is measured

        self._worker: Any = None

    def prepare(self, model: Path, rollout: Path) -> None:
        from miles_core.training.config import TrainerConfig
        from miles_core.training.worker import TrainerWorker

        if self._worker is not None:
            self._worker.close()
        config = TrainerConfig(
            global_batch_size=1024,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=CLIP_NORM,
            eps_clip=EPS_LOW,
            eps_clip_high=EPS_HIGH,
            kl_loss_coef=0.0,
            use_tis=True,
            tis_clip=TIS_CLIP,
            max_tokens_per_gpu=CAP,
            threads=1,
        )
        self._worker = TrainerWorker(config)
        self._worker.init_from_hf(str(model))
        self._rollout = rollout

    def step(self) -> tuple[float, float]:
        metrics = self._worker.train(0, str(self._rollout))
        return metrics["loss"], metrics["grad_norm"]


class Plain:
    """A loop over transformers' own model, padded rows and torch's fused AdamW.

    It is at its fastest: padding comes after all that is real, so causal attention needs no mask.
    """

    def __init__(self) -> None:
        import transformers.models.qwen3.modeling_qwen3

        transformers.utils.logging.disable_progress_bar()

    def prepare(self, model: Path, rollout: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        norms = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": norms, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        self.batches = padded_micro_batches(rollout)
        self.trajectories = sum(len(batch.tokens) for batch in self.batches)

    def log_probs(self, batch: Padded) -> torch.Tensor:
        """Of each token but the first, [b, s - 1]."""
        output = self.model(input_ids=batch.tokens, attention_mask=batch.attention, use_cache=False)
        logits = output.logits[:, :-1]
        targets = batch.tokens[:, 1:]
        return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
            targets
        )

    def loss(self, batch: Padded, old: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the loss."""
        ratio = (self.log_probs(batch) - old).exp()
        clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
        advantages = batch.advantages[:, None]
        sampled = batch.sampled[:, 1:]
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        per_token = per_token * self.importance(batch, old) * sampled
        return (per_token.sum(1) / sampled.sum(1)).sum() / self.trajectories

    @staticmethod
    def importance(batch: Padded, old: torch.Tensor) -> torch.Tensor:
        """Truncated ratio of the trainer's to the engine's probabilities, for `old` [b, n] of the
        last n tokens."""
        return (old - batch.rollout[:, -old.shape[1] :]).exp().clamp(max=TIS_CLIP)

    def step(self) -> tuple[float, float]:
        with torch.no_grad():
            old = [self.log_probs(batch) for batch in self.batches]
        return self.update(old)

    def update(self, old: Sequence[torch.Tensor]) -> tuple[float, float]:
        """One optimizer step."""
        total = 0.0
        for batch, recorded in zip(self.batches, old, strict=True):
            loss = self.loss(batch, recorded)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, float(norm)


class _OneProcess:
    """The parts of accelerate's Accelerator that the loss asks for, without accelerate's work."""

    num_processes = 1
    sync_gradients = True
    is_main_process = True

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)


_TRL_METRICS = (
    "entropy",
    "entropy_coef",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
)


class Trl(Plain):
    """GRPOTrainer's own log-probabilities and loss in the loop of `Plain`.

    Its first tokens are the prompt, whose logits it leaves out, as it does in its own training.
    """

    def __init__(self) -> None:
        super().__init__()
        import trl.trainer.grpo_trainer

        self._trl: Any = trl.trainer.grpo_trainer

    def prepare(self, model: Path, rollout: Path) -> None:
        super().prepare(model, rollout)
        self._trl.add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        kind = self._trl.GRPOTrainer
        self._trainer = SimpleNamespace(
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            beta=0.0,
            args=SimpleNamespace(delta=None),
            loss_type="grpo",
            epsilon_low=EPS_LOW,
            epsilon_high=EPS_HIGH,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            model=self.model,
            accelerator=_OneProcess(),
            entropy_coef=0.0,
            _entropy_bonus_enabled=False,
            _metrics={"train": {name: [] for name in _TRL_METRICS}},
        )
        self._trainer._get_per_token_logps_and_entropies = (
            kind._get_per_token_logps_and_entropies.__get__(self._trainer)
        )
        self._compute_loss = kind._compute_loss.__get__(self._trainer)

    @staticmethod
    def _prompt(batch: Padded) -> int:
        """Tokens before the first sampled one."""
        return int(batch.sampled.any(0).nonzero()[0])

    def log_probs(self, batch: Padded) -> torch.Tensor:
        """Of each token after the prompt, [b, n]."""
        keep = batch.tokens.shape[1] - self._prompt(batch)
        found = self._trainer._get_per_token_logps_and_entropies(
            self.model, batch.tokens, batch.attention, keep
        )
        return found[0]

    def loss(self, batch: Padded, old: torch.Tensor) -> torch.Tensor:
        split = self._prompt(batch)
        inputs = {
            "prompt_ids": batch.tokens[:, :split],
            "prompt_mask": batch.attention[:, :split],
            "completion_ids": batch.tokens[:, split:],
            "completion_mask": batch.attention[:, split:],
            "tool_mask": batch.sampled[:, split:],
            "advantages": batch.advantages,
            "old_per_token_logps": old,
            "importance_sampling_ratio": self.importance(batch, old),
        }
        # the loss is a mean over the rows of the micro-batch
        self._trainer.current_gradient_accumulation_steps = self.trajectories / len(batch.tokens)
        return self._compute_loss(self.model, inputs)


CONTESTANTS: dict[str, type[Contestant]] = {"ours": Ours, "transformers": Plain, "trl": Trl}
