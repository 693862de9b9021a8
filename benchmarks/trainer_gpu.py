"""Tokens per second and model FLOPs use of a GRPO step on one GPU, for `trainer.py --device cuda`.

A Qwen3 of about 1B random weights in bfloat16 trains on trajectories of 8192 tokens, all sampled
after the prompt: log-probabilities before the step, the update, AdamW on float32 masters. Model
FLOPs are those of `miles_core.modeling.flops`; recomputed activations do not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from trainer_batches import PROMPT, make_rollout

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "intermediate_size": 4608,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
LENGTH = 8192
TRAJECTORIES = 8

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
"""Dense bfloat16 with float32 sums, from the makers' data sheets; the first name that fits."""


def peak_tflops(name: str) -> float | None:
    """Of a GPU by the name that torch gives it; None when it is not listed."""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def make_model(directory: Path, shape: dict[str, Any]) -> int:
    """Write a random Qwen3 in bfloat16; the number of its weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def run(
    shape: dict[str, Any],
    lengths: list[int],
    repeats: int,
    tokens: int,
    recompute: bool,
    peak: float,
) -> dict[str, Any]:
    """Steps over one rollout after one that warms up; `peak` in 10^12 operations a second."""
    from miles_core.modeling.flops import forward_flops, training_flops
    from miles_core.modeling.hf_config import read_spec
    from miles_core.training.config import TrainerConfig
    from miles_core.training.worker import TrainerWorker

    config = TrainerConfig(
        global_batch_size=1024,
        kl_loss_coef=0.0,
        use_tis=True,
        max_tokens_per_gpu=tokens,
        recompute=recompute,
        dtype="bfloat16",
    )
    with tempfile.TemporaryDirectory() as folder:
        model, rollout = Path(folder) / "model", Path(folder) / "0.pt"
        weights = make_model(model, shape)
        make_rollout(rollout, lengths, 1.0, shape["vocab_size"])
        worker = TrainerWorker(config)
        try:
            worker.init_from_hf(str(model))
            spec = read_spec(model)
            steps = _steps(worker, rollout, repeats)
        finally:
            worker.close()
    before = sum(forward_flops(spec, n, n - PROMPT) for n in lengths)
    update = sum(training_flops(spec, n, n - PROMPT) for n in lengths)
    seconds, seconds_update = (
        statistics.median(step[name] for step in steps) for name in ("wall", "seconds_update")
    )
    return {
        "weights": weights,
        "trajectories": len(lengths),
        "tokens": sum(lengths),
        "max_tokens_per_gpu": tokens,
        "recompute": recompute,
        "loss": steps[-1]["loss"],
        "grad_norm": steps[-1]["grad_norm"],
        "seconds": seconds,
        "seconds_all": [step["wall"] for step in steps],
        "seconds_update": seconds_update,
        "tokens_per_second": sum(lengths) / seconds,
        "mfu": (before + update) / seconds / peak / 1e12,
        "mfu_update": update / seconds_update / peak / 1e12,
        "peak_tflops": peak,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9
        if torch.cuda.is_available()
        else None,
    }


def _steps(worker: Any, rollout: Path, repeats: int) -> list[dict[str, float]]:
    found = []
    for number in range(repeats + 1):
        started = time.perf_counter()
        metrics = worker.train(0, str(rollout))  # ends with numbers that were read from the GPU
        wall = time.perf_counter() - started
        print(f"step {number} of {repeats}: {wall:.2f} s", file=sys.stderr, flush=True)
        if number:
            found.append({**metrics, "wall": wall})
    return found


def benchmark(repeats: int, tokens: int, recompute: bool, peak: float | None) -> dict[str, Any]:
    """On the first GPU. Raises RuntimeError without one, or when its peak is not known."""
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda needs a GPU that torch sees; without one leave it out")
    name = torch.cuda.get_device_name()
    peak = peak or peak_tflops(name)
    if peak is None:
        raise RuntimeError(f"the peak of {name} is not listed; give it with --peak-tflops")
    found = run(SHAPE, [LENGTH] * TRAJECTORIES, repeats, tokens, recompute, peak)
    return {"benchmark": "trainer_gpu", "gpu": name, "repeats": repeats, **found}


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    print(f"Qwen3 of {result['weights'] / 1e9:.2f}B random weights, bfloat16, on {result['gpu']}")
    print(
        f"{result['trajectories']} trajectories, {result['tokens']} tokens; "
        f"{result['repeats']} steps after one, medians"
    )
    print(
        f"step   {result['seconds']:.2f} s, {result['tokens_per_second']:.0f} tokens/s, "
        f"{result['mfu']:.1%} of {result['peak_tflops']:.0f} TFLOP/s"
    )
    print(f"update {result['seconds_update']:.2f} s, {result['mfu_update']:.1%}")
    print(f"peak of GPU memory {result['peak_memory_gb']:.1f} GB")
