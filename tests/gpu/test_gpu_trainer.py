"""The trainer on one GPU without Transformer Engine: parity, one-device layouts and resume."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import layout_process
import pytest
import torch
from family_models import MODELS, make_moe
from layout_helpers import assert_same
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainer_helpers import VOCAB, make_hf, make_rollout
from transformers import AutoModelForCausalLM

from miles_core.modeling import log_probs, parallel
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_weights import HFReader, load_hf

SIZES = [9, 33, 20]
TEMPERATURE = 0.8
HALF = {"dtype": "bfloat16"}
ROUNDING = {"float32": 1e-4, "bfloat16": 0.06}
"""Of losses and gradient norms that are the same but for the order of sums."""


@pytest.fixture
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def make(directory: Path, kind: str) -> Path:
    return make_moe(directory, kind) if kind in MODELS else make_hf(directory, kind)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in SIZES]


def logits_of_transformers(path: Path, dtype: torch.dtype, device: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    with torch.no_grad():
        parts = [model(text[None].to(device)).logits[0].float().cpu() for text in texts()]
    return torch.cat(parts)


def packed_logits(path: Path, dtype: torch.dtype) -> torch.Tensor:
    spec = read_spec(path)
    model = build_model(spec, 1, dtype)
    load_hf(model, spec, HFReader(path))
    with torch.no_grad():
        tokens = torch.cat(texts()).to(parallel.device())
        return model.packed_logits(tokens, SIZES).float().cpu()


@pytest.mark.parametrize("kind", ["qwen3", "llama", *MODELS])
def test_logits_in_float32_are_those_of_transformers(
    groups: None, tmp_path: Path, kind: str
) -> None:
    path = make(tmp_path / "hf", kind)
    want = logits_of_transformers(path, torch.float32, "cpu")
    got = packed_logits(path, torch.float32)
    assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_logits_in_bfloat16_are_as_close_as_those_of_transformers(
    groups: None, tmp_path: Path, kind: str
) -> None:
    """Without experts: a rounded score may choose others."""
    path = make(tmp_path / "hf", kind)
    exact = logits_of_transformers(path, torch.float32, "cpu")
    theirs = logits_of_transformers(path, torch.bfloat16, parallel.device()) - exact
    ours = packed_logits(path, torch.bfloat16) - exact
    assert float(ours.square().mean().sqrt()) <= 1.5 * float(theirs.square().mean().sqrt())


def test_packed_attention_in_bfloat16_never_holds_the_scores(groups: None, tmp_path: Path) -> None:
    """Raises where the flash kernel does not take what it is given."""
    path = make(tmp_path / "hf", "qwen3")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert torch.isfinite(packed_logits(path, torch.bfloat16)).all()


def test_log_probabilities_in_blocks(groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 16), torch.randn(VOCAB, 16)
    targets = torch.randint(0, VOCAB, (700,))
    monkeypatch.setattr(log_probs, "KEPT", 0)
    monkeypatch.setattr(log_probs, "BLOCK", dict.fromkeys(log_probs.BLOCK, 1))
    found = []
    for device in ("cpu", parallel.device()):
        a, b = (x.to(device).requires_grad_() for x in (hidden, weight))
        head = log_probs.Head(a, b)
        values, entropies = log_probs.log_probs_and_entropy(head, targets.to(device), TEMPERATURE)
        (values + 0.1 * entropies).sum().backward()
        assert a.grad is not None and b.grad is not None
        found.append([x.detach().cpu() for x in (values, entropies, a.grad, b.grad)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def steps(hf: Path, rollout: Path, **changes: Any) -> list[dict[str, Any]]:
    return layout_process.train({"hf": str(hf), "changes": changes}, str(rollout))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_of_the_work_do_not_change_the_steps(tmp_path: Path, dtype: str) -> None:
    """Packed and padded, one, two and eight samples at a time, whole and split, recomputed."""
    hf = make(tmp_path / "hf", "qwen3")
    whole = make_rollout(tmp_path / "whole.pt")
    split = make_rollout(tmp_path / "split.pt", split=True)
    want = steps(hf, whole, max_tokens_per_gpu=4096, dtype=dtype)
    for rollout, changes in (
        (whole, {"micro_batch_size": 1}),
        (whole, {"micro_batch_size": 2, "packing": False}),
        (whole, {"micro_batch_size": 8, "packing": False}),
        (whole, {"micro_batch_size": 8, "recompute": True}),
        (split, {"micro_batch_size": 2, "packing": False}),
        (split, {}),
    ):
        got = steps(hf, rollout, dtype=dtype, **changes)
        assert_same(f"{dtype} {changes}", got, want, ROUNDING[dtype])


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe_lite"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_a_resume_are_those_without(tmp_path: Path, kind: str, dtype: str) -> None:
    """But for sums in another order in the backward pass of attention, two runs are the same."""
    hf, rollout = make(tmp_path / "hf", kind), make_rollout(tmp_path / "0.pt")
    saved = tmp_path / "saved"
    case = {"hf": str(hf), "changes": {"dtype": dtype}, "save": str(saved)}
    want = layout_process.train(case, str(rollout))
    resumed = {"load": str(saved), "changes": {"dtype": dtype}}
    got = layout_process.train(resumed, str(rollout))
    assert_same(f"{kind} {dtype}", got, want[layout_process.SAVED :], ROUNDING[dtype] / 2)


def test_the_memory_of_a_step_is_bounded_by_the_token_limit(tmp_path: Path) -> None:
    """Twice the samples in micro-batches of the same size need no more memory."""
    hf = make(tmp_path / "hf", "qwen3")
    config = replace(layout_process.CONFIG, dtype="bfloat16", global_batch_size=64)
    peaks = []
    for members in (4, 8):
        rollout = make_rollout(tmp_path / f"{members}.pt", groups=4, members=members)
        worker = layout_process.TrainerWorker(config)
        try:
            worker.init_from_hf(str(hf))
            worker.train(0, str(rollout))
            torch.cuda.reset_peak_memory_stats()
            worker.train(0, str(rollout))
            peaks.append(torch.cuda.max_memory_allocated())
        finally:
            worker.close()
    assert peaks[1] <= 1.1 * peaks[0]
