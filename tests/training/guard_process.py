"""One rank on which things go wrong, in one layout after the other."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_helpers import meet
from trainer_helpers import CONFIG

from miles_core.training import grpo
from miles_core.training.worker import TrainerWorker


def state(worker: TrainerWorker) -> str:
    """Digest of this rank's weights, optimizer state and step counts."""
    digest = hashlib.sha256()
    for _, value in worker.policy.model.stored_tensors():
        digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    optimizer = worker.policy.optimizer
    for part in optimizer._inner.chained_optimizers:
        for entry in part.optimizer.state.values():
            for name in sorted(entry):
                digest.update(entry[name].numpy().tobytes())
    return f"{digest.hexdigest()} {optimizer.steps}"


def refused(worker: TrainerWorker, rollout: str) -> dict[str, Any]:
    before = state(worker)
    metrics = worker.train(0, rollout)
    return {
        "steps": metrics["optimizer_steps"],
        "problems": metrics["nonfinite"],
        "unchanged": state(worker) == before,
    }


def run(case: dict[str, Any], rank: int, world: int, rollout: str) -> dict[str, Any]:
    changes = {"kl_loss_coef": 0.0, "max_tokens_per_gpu": 90, **case["changes"]}
    worker = TrainerWorker(replace(CONFIG, **changes), rank, world, **meet(rank))
    answers: dict[str, Any] = {}
    try:
        worker.init_from_hf(case["hf"])
        answers["first"] = worker.train(0, rollout)["optimizer_steps"]
        one = rank == world - 1
        name, weight = next(
            (n, p) for n, p in worker.policy.model.named_parameters() if "layernorm" in n
        )
        answers["name"] = worker.policy.model.global_name(name)
        hook = weight.register_hook(lambda g: g * float("nan")) if one else None
        answers["gradient"] = refused(worker, rollout)
        if hook is not None:
            hook.remove()
        loss = grpo.policy_loss
        if one:
            grpo.policy_loss = lambda *args: (loss(*args)[0] * float("nan"), loss(*args)[1])
        answers["loss"] = refused(worker, rollout)
        grpo.policy_loss = loss
        answers["after"] = worker.train(0, rollout)["optimizer_steps"]
        for value in (0.01, float("inf")):
            if one:
                weight.data.flatten()[0] += value
            try:
                worker.train(0, rollout)
            except RuntimeError as error:
                answers[str(value)] = f"{type(error).__name__}: {error}"
    finally:
        worker.close()
    return answers


def rank_main(request: dict[str, Any], rank: int, world: int, out: Path) -> dict[str, Any]:
    """What went wrong in every case, and what came of it."""
    return {
        name: run(case, rank, world, request["rollout"]) for name, case in request["cases"].items()
    }
