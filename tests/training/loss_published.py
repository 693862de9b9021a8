"""The published formulas, trajectory by trajectory, in plain torch with float64.

Nothing here knows of samples, micro-batches, ranks or weights of tokens: a trajectory is the list
of its sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from loss_table import Case, descend, token_values, values_before

from miles_core.training.config import TrainerConfig


@dataclass
class Outcome:
    """Loss and gradient of each optimizer step, with respect to the logits, and with a critic to
    its values; returns and advantages of the tokens of each trajectory."""

    losses: list[float]
    gradients: list[torch.Tensor]
    advantages: list[torch.Tensor]
    importance: list[torch.Tensor]
    value_losses: list[float] = field(default_factory=list)
    value_gradients: list[torch.Tensor] = field(default_factory=list)
    returns: list[torch.Tensor] = field(default_factory=list)


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


def values_of(case: Case, values: torch.Tensor, number: int) -> torch.Tensor:
    return torch.cat([values_before(values, s)[s["mask"]] for s in case.sequences[number]])


def gae_of(
    case: Case, config: TrainerConfig, old: list[torch.Tensor], ref: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Schulman et al. 2015, equations 12 and 16: A_t is the sum over l of (gamma lambda)^l times
    delta_{t+l} = r_{t+l} + gamma V_{t+l+1} - V_{t+l}. Advantages and returns."""
    advantages, returns = [], []
    for i, reward in enumerate(case.rewards):
        v = values_of(case, case.values, i).tolist()
        r = (-config.kl_coef * kl(old[i], ref[i], config.kl_loss_type)).tolist()
        if r:
            r[-1] += reward
        delta = [r[t] + config.gamma * (*v, 0.0)[t + 1] - v[t] for t in range(len(v))]
        a = [
            sum((config.gamma * config.lambd) ** (u - t) * delta[u] for u in range(t, len(v)))
            for t in range(len(v))
        ]
        advantages.append(torch.tensor(a, dtype=torch.float64))
        returns.append(advantages[-1] + torch.tensor(v, dtype=torch.float64))
    if config.normalize_advantages:
        flat = torch.cat(advantages)
        advantages = [
            (a - flat.mean()) / (flat.var(unbiased=True) + 1e-8).sqrt() for a in advantages
        ]
    return advantages, returns


def train_critic(case: Case, config: TrainerConfig, outcome: Outcome) -> None:
    """The squared error, and that of a value that moved at most `value_clip`: the larger one."""
    values = case.values.clone().requires_grad_()
    count = len(case.rewards)
    for first in range(0, count, config.global_batch_size):
        members = list(range(first, min(count, first + config.global_batch_size)))
        lengths = [len(outcome.returns[i]) for i in members]
        total = 0.0 * values.sum()
        for i in members:
            now, before = values_of(case, values, i), values_of(case, case.values, i)
            near = torch.min(torch.max(now, before - config.value_clip), before + config.value_clip)
            errors = torch.max((now - outcome.returns[i]) ** 2, (near - outcome.returns[i]) ** 2)
            total = total + aggregated(config, errors, lengths)
        gradient = torch.autograd.grad(total, values)[0]
        outcome.value_losses.append(total.item())
        outcome.value_gradients.append(gradient)
        descend(values, gradient)


def aggregated(
    config: TrainerConfig, terms: torch.Tensor, lengths: list[int]
) -> torch.Tensor | float:
    """A trajectory's part of the loss; `lengths` are the sampled tokens of each trajectory."""
    if not len(terms):
        return 0.0
    if config.loss_aggregation == "trajectory":
        return terms.mean() / len(lengths)
    if config.loss_aggregation == "token":
        return terms.sum() / sum(lengths)
    assert config.loss_constant_length is not None
    return terms.sum() / config.loss_constant_length / len(lengths)


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
        total = total + aggregated(config, terms, lengths)
    return total


def published_step(case: Case, config: TrainerConfig) -> Outcome:
    """A step in which each `global_batch_size` trajectories make one plain gradient step."""
    count = len(case.rewards)
    logits = case.logits.clone().requires_grad_()
    old = [tokens_of(case, logits, i)[0].detach() for i in range(count)]
    ref = [tokens_of(case, case.ref_logits, i)[0] for i in range(count)]
    rollout = [torch.cat([s["rollout"][s["mask"]] for s in t]) for t in case.sequences]
    if config.use_rollout_logprobs:
        old = rollout
    importance = [importance_of(config, o, r) for o, r in zip(old, rollout, strict=True)]
    if config.advantage_estimator == "ppo":
        advantages, returns = gae_of(case, config, old, ref)
        outcome = Outcome([], [], advantages, importance, returns=returns)
        train_critic(case, config, outcome)
    else:
        advantages = advantages_of(case, config, old, ref)
        outcome = Outcome([], [], advantages, importance)
    data = {"old": old, "ref": ref, "advantages": advantages, "importance": importance}
    if config.num_critic_only_steps > 0:
        return outcome
    for first in range(0, count, config.global_batch_size):
        members = list(range(first, min(count, first + config.global_batch_size)))
        loss = loss_of(case, config, logits, members, data)
        gradient = torch.autograd.grad(loss, logits)[0]
        outcome.losses.append(loss.item())
        outcome.gradients.append(gradient)
        descend(logits, gradient)
    return outcome
