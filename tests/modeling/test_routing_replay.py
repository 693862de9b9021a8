"""Given experts against transformers' models that are made to take them: logits and gradients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import MODELS, VOCAB, make_moe
from forced_routes import forced, others, record
from parity_helpers import compare_gradients
from transformers import AutoModelForCausalLM

from miles_core.modeling import parallel, schedule
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_weights import HFReader, load_hf
from miles_core.modeling.log_probs import Head
from miles_core.modeling.routing import RoutedPass
from miles_core.training.batch import Packed, make_sample

SIZES = [9, 2, 20, 14]


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def loaded(path: Path, recompute: bool = False) -> Any:
    spec = read_spec(path)
    model = build_model(spec, 1, torch.float32, recompute=recompute)
    load_hf(model, spec, HFReader(path))
    return model


def micro_batches(texts: list[torch.Tensor]) -> list[Packed]:
    """Two micro-batches of two texts each; everything but a first token counts as sampled."""
    samples = [
        make_sample(f"t{i}", i, 0, text, torch.arange(len(text)) > 0)
        for i, text in enumerate(texts)
    ]
    return [Packed(samples[:2], torch.device("cpu")), Packed(samples[2:], torch.device("cpu"))]


def run(
    model: Any, batches: list[Packed], routed: RoutedPass | None, packed: bool = True
) -> list[torch.Tensor]:
    """Logits of each micro-batch; gradients of their sum of squares are left in the model."""
    logits: list[torch.Tensor] = []

    def last(head: Head, *_: Any) -> torch.Tensor:
        out = head.logits()
        logits.append(out.detach().clone())
        return out.square().sum()

    schedule.run(model, batches, last, packed=packed, backward=True, routed=routed)
    return logits


@pytest.mark.parametrize("kind", list(MODELS))
def test_given_experts_are_those_of_a_forced_transformers(kind: str, tmp_path: Path) -> None:
    path = make_moe(tmp_path / "hf", kind, layers=3)
    model = loaded(path, recompute=True)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in SIZES]
    with torch.no_grad():
        own = [record(reference, text)[1] for text in texts]
    given = [others(experts, 4, generator) for experts in own]
    batches = micro_batches(texts)
    routed = RoutedPass(
        model,
        [torch.cat(given[:2]).short(), torch.cat(given[2:]).short()],
        backward=True,
        record=True,
    )
    got = torch.cat(run(model, batches, routed))

    logits = [forced(reference, text, experts) for text, experts in zip(texts, given, strict=True)]
    want = torch.cat([one[:-1] for one in logits])
    want.square().sum().backward()
    free = torch.cat([record(reference, text)[0][:-1] for text in texts])
    scale = want.abs().max().item()
    assert (got - want).abs().max().item() <= 1e-5 * scale
    assert (free - want).abs().max().item() > 1e-2 * scale
    compare_gradients(model, reference, path)

    taken = torch.cat(routed.taken)
    told = torch.cat(given)
    assert torch.equal(taken[told >= 0], told[told >= 0].short())
    assert (taken >= 0).all()
    assert routed.replayed == int((told >= 0).sum())
    assert 0 < routed.differing < routed.replayed


@pytest.mark.parametrize("kind", ["qwen3_moe_unnormalised", "glm4_moe", "glm4_moe_lite"])
@pytest.mark.parametrize("packed", [True, False])
def test_own_experts_given_again_change_no_bit(kind: str, packed: bool, tmp_path: Path) -> None:
    model = loaded(make_moe(tmp_path / "hf", kind))
    generator = torch.Generator().manual_seed(4)
    batches = micro_batches([torch.randint(0, VOCAB, (n,), generator=generator) for n in SIZES])
    plain = run(model, batches, None, packed)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    recorded = RoutedPass(model, [None, None], backward=True, record=True)
    run(model, batches, recorded, packed)
    assert recorded.replayed == 0
    model.zero_grad()
    again = RoutedPass(model, recorded.taken, backward=True)
    for one, other in zip(run(model, batches, again, packed), plain, strict=True):
        assert torch.equal(one, other)
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(param.grad, gradient)
    assert again.replayed > 0
    assert again.differing == 0
