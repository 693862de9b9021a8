"""One tensor-parallel rank: log-probabilities over its part of a vocabulary, to a file."""

from pathlib import Path
from typing import Any

import torch
from rank_helpers import meet

from miles_core.modeling import log_probs, parallel

ROWS, WIDTH, VOCAB = 23, 16, 40
TEMPERATURE = 0.7


def inputs(scale: float) -> dict[str, torch.Tensor]:
    """Hidden states and weight, targets, and gradients of values and entropies."""
    dice = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(ROWS, WIDTH, generator=dice) * scale,
        "weight": torch.randn(VOCAB, WIDTH, generator=dice),
        "targets": torch.randint(0, VOCAB, (ROWS,), generator=dice),
        "of_value": torch.randn(ROWS, generator=dice),
        "of_entropy": torch.randn(ROWS, generator=dice),
    }


def own(scale: float, entropy: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Values and gradients of this rank, its part of the weight's."""
    given = inputs(scale)
    hidden = given["hidden"].to(dtype).requires_grad_()
    group = parallel.tp_group()
    part = given["weight"].to(dtype).chunk(group.size())[group.rank()]
    weight = part.clone().requires_grad_()
    head = log_probs.Head(hidden, weight)
    if entropy:
        values, entropies = log_probs.log_probs_and_entropy(head, given["targets"], TEMPERATURE)
        total = (values * given["of_value"] + entropies * given["of_entropy"]).sum()
    else:
        values = log_probs.token_log_probs(head, given["targets"], TEMPERATURE)
        entropies, total = torch.zeros(ROWS), (values * given["of_value"]).sum()
    total.backward()
    with torch.no_grad():
        observed = log_probs.log_probs_and_entropy(head, given["targets"], TEMPERATURE)
    found = {"values": values, "entropies": entropies, "observed": torch.stack(observed)}
    return {
        **{name: value.detach() for name, value in found.items()},
        "of_hidden": hidden.grad,
        "of_weight": weight.grad,
    }


def rank_main(request: None, rank: int, world: int, out: Path) -> str:
    """The file with the answers of both paths, with entropy and without."""
    place = meet(rank)
    port, listener = place["master_port"], place["listener"]
    parallel.start(rank, world, "127.0.0.1", port, world, seed=1, listener=listener)
    answers = {}
    for kept in (0, log_probs.KEPT):
        log_probs.KEPT, log_probs.MIN_ROWS, log_probs.BLOCK = kept, 5, {"cpu": 1}
        for entropy in (False, True):
            answers[f"{'kept' if kept else 'again'}-{entropy}"] = own(1.0, entropy)
    parallel.stop()
    file = out.with_name(f"{rank}.pt")
    torch.save(answers, file)
    return str(file)
