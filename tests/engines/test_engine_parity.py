"""The engine's log-probabilities are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from miles_core.engines.engine import Engine, EngineOptions
from miles_core.engines.model import Run, Segment
from miles_core.engines.request import Request
from miles_core.engines.sampling import SamplingParams
from miles_core.engines.shape import ModelDirectoryError, read_shape

TOLERANCE = 2e-5


def reference(directory: Path) -> Callable[[list[int]], torch.Tensor]:
    """Log-probabilities [tokens, vocab] of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def make_engine(directory: Path, **options: int) -> Engine:
    """An engine without a thread: the test steps it."""

    def fail(error: BaseException) -> None:
        raise AssertionError("the engine's thread is not started here") from error

    return Engine(EngineOptions(directory, **options), fail)


@torch.inference_mode()
def generate(
    engine: Engine, prompts: list[list[int]], new: int = 6, **fields: int
) -> list[Request]:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    requests = [
        Request(f"r{i}", ids, params, lambda _: None, limit=new, **fields)
        for i, ids in enumerate(prompts)
    ]
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.busy:
        engine.scheduler.step()
    return requests


def worst(request: Request, logprobs: Callable[[list[int]], torch.Tensor]) -> float:
    """Largest difference over a request's sampled tokens."""
    ids = request.input_ids + request.output_ids
    rows = logprobs(ids)[len(request.input_ids) - 1 : -1]
    wanted = rows.gather(1, torch.tensor(request.output_ids).unsqueeze(1)).squeeze(1)
    return float((wanted - torch.tensor(request.output_logprobs)).abs().max())


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 290, (length,), generator=generator).tolist()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_batched_ragged_prompts_match(models: dict[str, Path], family: str) -> None:
    requests = generate(
        make_engine(models[family]), [prompt(n, n) for n in (1, 2, 40, 7, 120)], new=12
    )
    logprobs = reference(models[family])
    assert max(worst(request, logprobs) for request in requests) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_prefix_extension_matches_and_is_counted(models: dict[str, Path], family: str) -> None:
    engine, logprobs = make_engine(models[family]), reference(models[family])
    (first,) = generate(engine, [prompt(50, 1)])
    ids = first.input_ids + first.output_ids + prompt(9, 2)
    (second,) = generate(engine, [ids])
    assert second.cached == len(first.input_ids) + len(first.output_ids) - 1
    assert worst(second, logprobs) <= TOLERANCE
    # A branch in the middle copies, and the longer sequence stays usable.
    branch, again = generate(engine, [ids[:30] + prompt(10, 3), ids])
    assert branch.cached == 30 and again.cached == len(ids) - 1
    assert max(worst(branch, logprobs), worst(again, logprobs)) <= TOLERANCE


def test_equal_prompts_are_computed_once(models: dict[str, Path]) -> None:
    requests = generate(make_engine(models["qwen3"]), [prompt(60, 4)] * 4)
    assert [r.cached for r in requests] == [0, 59, 59, 59]
    assert max(worst(r, reference(models["qwen3"])) for r in requests) <= TOLERANCE


@pytest.mark.parametrize("start", [-1, 3])
@pytest.mark.parametrize("chunk", [16, 17, 33])
def test_chunked_prefill_matches(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, chunk: int, start: int
) -> None:
    monkeypatch.setattr("miles_core.engines.scheduler.STEP_TOKENS", chunk)
    requests = generate(
        make_engine(models["llama"]), [prompt(100, 5), prompt(33, 6)], logprob_start=start
    )
    logprobs = reference(models["llama"])
    assert max(worst(request, logprobs) for request in requests) <= TOLERANCE
    if start < 0:
        assert not any(request.input_logprobs for request in requests)
        return
    for request in requests:
        ids = torch.tensor(request.input_ids)
        wanted = logprobs(request.input_ids)[3:-1].gather(1, ids[4:].unsqueeze(1)).squeeze(1)
        assert (wanted - torch.tensor(request.input_logprobs)).abs().max() <= TOLERANCE


def test_retracted_requests_match(models: dict[str, Path]) -> None:
    engine = make_engine(models["qwen3"])
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    request = Request("r", prompt(30, 7), params, lambda _: None, limit=10)
    engine.scheduler.add(request)
    with torch.inference_mode():
        for _ in range(4):
            engine.scheduler.step()
        assert engine.scheduler.retract_all() == 1 and engine.scheduler.pool.used == 0
        while engine.scheduler.busy:
            engine.scheduler.step()
    assert request.retractions == 1 and len(request.output_ids) == 10
    assert worst(request, reference(models["qwen3"])) <= TOLERANCE


def test_bounded_cache_makes_requests_wait(models: dict[str, Path]) -> None:
    engine = make_engine(models["qwen3"], max_total_tokens=100)
    prompts = [prompt(30, 10 + i) for i in range(6)]
    peak = 0
    step = engine.scheduler.step

    def counted() -> None:
        nonlocal peak
        step()
        peak = max(peak, len(engine.scheduler.running))
        assert engine.scheduler.pool.used <= 100

    engine.scheduler.step = counted  # type: ignore[method-assign]
    requests = generate(engine, prompts, new=5)
    assert peak == 2
    assert max(worst(r, reference(models["qwen3"])) for r in requests) <= TOLERANCE


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "big"), ("architectures", ["GPT2LMHeadModel"]), ("vocab_size", None)],
)
def test_a_wrong_configuration_names_file_and_field(
    models: dict[str, Path], tmp_path: Path, field: str, value: object
) -> None:
    import json

    config = json.loads((models["qwen3"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelDirectoryError, match=rf"config\.json: field {field}"):
        read_shape(tmp_path)


def test_bfloat16_is_close(models: dict[str, Path]) -> None:
    engine = Engine(EngineOptions(models["qwen3"], dtype="bfloat16"), lambda _: None)
    requests = generate(engine, [prompt(40, 8), prompt(9, 9)])
    assert max(worst(r, reference(models["qwen3"])) for r in requests) < 0.5


def test_sequences_of_one_length_are_decoded_in_one_run(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(models["qwen3"])
    decoder = engine.scheduler.decoder
    runs_of, seen = decoder._runs, []

    def noted(segments: list[Segment]) -> list[Run]:
        runs = runs_of(segments)
        seen.append([run.count for run in runs])
        return runs

    monkeypatch.setattr(decoder, "_runs", noted)
    lengths = (40, 40, 40, 7, 30, 30, 40)
    requests = generate(engine, [prompt(n, 20 + i) for i, n in enumerate(lengths)], new=8)
    assert [3, 1, 2, 1] in seen
    logprobs = reference(models["qwen3"])
    assert max(worst(request, logprobs) for request in requests) <= TOLERANCE
