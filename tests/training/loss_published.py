"""The published formulas, trajectory by trajectory, in plain torch with float64.

Nothing here knows of samples, micro-batches, ranks or weights of tokens: a trajectory is the list
of its sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from loss_table import Case, descend, token_values

from miles_core.training.config import TrainerConfig


@dataclass
class Outcome:
    """Loss and gradient with respect to the logits of each optimizer step."""

    losses: list[float]
    gradients: list[torch.Tensor]
    advantages: list[torch.Tensor]
    importance: list[torch.Tensor]


def tokens_of(case: Case, logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [token_values(logits, s) for s in case.sequences[number]]
    masks = [s["mask"] for s in case.sequences[number]]
    values = torch.cat([v[m] for (v, _), m in zip(parts, masks, strict=True)])
    entropy = torch.cat([e[m] for (_, e), m in zip(parts, masks, strict=True)])
    return values, entropy


def kl(log_p: torch.Tensor, log_ref: torch.Tensor, kind: str) -> torch.Tensor:
    """Schulman, "Approximating KL divergence": r = ref / p; k1 = -log r, k2 = (log r)^2 / 2,
    k3 = (r - 1) - log r."""
    log_r = log_ref - log_p
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r**2 / 2
    return log_r.exp() - 1 - log_r


def advantages_of(
    case: Case, config: TrainerConfig, old: list[torch.Tensor], ref: list[torch.Tensor]
) -> list[torch.Tensor]:
    penalty = [
        config.kl_coef * kl(o, r, config.kl_loss_type) for o, r in zip(old, ref, strict=True)
    ]
    plus_plus = config.advantage_estimator.startswith("reinforce")
    result: list[torch.Tensor] = []
    first = 0
    for size in case.groups:
        rewards = [
            case.rewards[i] - (0 if plus_plus else penalty[i].sum().item())
            for i in range(first, first + size)
        ]
        mean = sum(rewards) / size
        std = (sum((r - mean) ** 2 for r in rewards) / (size - 1)) ** 0.5
        for i, reward in enumerate(rewards):
            others = (sum(rewards) - reward) / (size - 1)
            a = {
                "grpo": (reward - mean) / (std + 1e-6 if config.grpo_std_normalization else 1),
                "rloo": reward - others,
                "reinforce_plus_plus": reward,
                "reinforce_plus_plus_baseline": reward - mean,
            }[config.advantage_estimator.replace("gspo", "grpo")]
            tokens = torch.full_like(old[first + i], a)
            if plus_plus:
                for t in range(len(tokens)):
                    tokens[t] -= penalty[first + i][t:].sum()
            result.append(tokens)
        first += size
    if plus_plus:
        flat = torch.cat(result)
        result = [(a - flat.mean()) / (flat.var(unbiased=True) + 1e-8).sqrt() for a in result]
    return result


def importance_of(config: TrainerConfig, old: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    if not config.use_tis:
        return torch.ones_like(old)
    rho = (old - rollout).exp()
    if config.tis_level == "sequence":
        rho = torch.full_like(rho, rho.prod().item())
    if config.tis_level == "geometric":
        rho = torch.full_like(rho, rho.prod().item() ** (1 / max(1, len(rho))))
    low, high = config.tis_clip_low, config.tis_clip
    if config.tis_mode == "tis":
        return rho.clip(low, high)
    return torch.tensor([r if low <= r <= high else 0.0 for r in rho.tolist()], dtype=rho.dtype)


def clipped_loss(ratio: torch.Tensor, a: torch.Tensor, config: TrainerConfig) -> torch.Tensor:
    """-min(ratio A, clip(ratio) A), and with a dual clip -max(that min, c A) where A < 0."""
    gain = torch.min(ratio * a, ratio.clip(1 - config.eps_clip, 1 + config.eps_clip_high) * a)
    if config.eps_clip_c is not None:
        gain = torch.where(a < 0, torch.max(gain, config.eps_clip_c * a), gain)
    return -gain


def loss_of(
    case: Case,
    config: TrainerConfig,
    logits: torch.Tensor,
    members: list[int],
    data: dict[str, list[torch.Tensor]],
) -> torch.Tensor:
    total = 0.0 * logits.sum()
    lengths = [len(data["old"][i]) for i in members]
    for i in members:
        log_p, entropy = tokens_of(case, logits, i)
        if not len(log_p):
            continue
        ratio = (log_p - data["old"][i]).exp()
        used = ratio
        if config.advantage_estimator == "gspo":
            used = ((log_p - data["old"][i]).sum() / len(log_p)).exp().expand(len(log_p))
        terms = clipped_loss(used, data["advantages"][i], config) * data["importance"][i]
        if config.kl_loss_coef > 0:
            penalty = kl(log_p, data["ref"][i], config.kl_loss_type)
            terms = terms + config.kl_loss_coef * penalty * (
                ratio if config.use_unbiased_kl else 1.0
            )
        terms = terms - config.entropy_coef * entropy
        if config.loss_aggregation == "trajectory":
            total = total + terms.mean() / len(members)
        elif config.loss_aggregation == "token":
            total = total + terms.sum() / sum(lengths)
        else:
            assert config.loss_constant_length is not None
            total = total + terms.sum() / config.loss_constant_length / len(members)
    return total


def published_step(case: Case, config: TrainerConfig) -> Outcome:
    """A step in which each `global_batch_size` trajectories make one plain gradient step."""
    count = len(case.rewards)
    logits = case.logits.clone().requires_grad_()
    old = [tokens_of(case, logits, i)[0].detach() for i in range(count)]
    ref = [tokens_of(case, case.ref_logits, i)[0] for i in range(count)]
    rollout = [torch.cat([s["rollout"][s["mask"]] for s in t]) for t in case.sequences]
    importance = [importance_of(config, o, r) for o, r in zip(old, rollout, strict=True)]
    advantages = advantages_of(case, config, old, ref)
    data = {"old": old, "ref": ref, "advantages": advantages, "importance": importance}
    outcome = Outcome([], [], advantages, importance)
    for first in range(0, count, config.global_batch_size):
        members = list(range(first, min(count, first + config.global_batch_size)))
        loss = loss_of(case, config, logits, members, data)
        gradient = torch.autograd.grad(loss, logits)[0]
        outcome.losses.append(loss.item())
        outcome.gradients.append(gradient)
        descend(logits, gradient)
    return outcome
