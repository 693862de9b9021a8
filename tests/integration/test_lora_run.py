"""A run of adapters whose driver is killed while a checkpoint is written, and what it leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_kills import pid_of
from trained_again import trained_again
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

# The model has never solved a task: the bonus for entropy is what moves the adapters.
FLAGS = ("--lora-rank", "4", "--lr", "1e-3", "--lr-warmup-steps", "0", "--entropy-coef", "0.01")
SAME = ("loss", "grad_norm", "kl_loss", "entropy", "lr", "train_rollout_kl")


def kill_in_save(run: Path, iteration: int, process: Any) -> None:
    """Kill the driver as soon as a rank writes its part of a save."""
    pid, unfinished = 0, f".tmp-iter_{iteration:07d}-*/*.distcp"
    deadline = time.monotonic() + 600
    while not any((run / "checkpoints").glob(unfinished)):
        assert process.poll() is None and time.monotonic() < deadline
        if not pid and (run / "checkpoints" / "iter_0000001").exists():
            pid = pid_of(run, "driver", 0)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40)[None]).logits[0]


def test_a_kill_in_a_save_changes_nothing_and_the_adapters_come_out(runs, tmp_path):
    run = runs.directory / "lora"
    process = runs.start("lora", *FLAGS, "--num-rollout", "2")
    kill_in_save(run, 2, process)
    code = runs.finish(process)
    saved = runs.events("lora", "checkpoint_saved")
    started = runs.events("lora", "run_started")
    assert [e["from_step"] for e in started] == [0, 1], "the save was complete before the kill"
    assert code == 0, runs.output("lora")[-3000:]
    assert [e["iteration"] for e in saved] == [1, 2] and all(e["background"] for e in saved)
    runs.complete("lora", *FLAGS, "--num-rollout", "4")

    trained = runs.trained("lora")
    assert [metrics["step"] for metrics in trained] in ([0, 1, 2, 3], [0, 1, 1, 2, 3])
    again = trained_again(run, 4, export=tmp_path / "again")
    for here in trained:
        assert here["optimizer_steps"] == 1 and here["grad_norm"] > 0
        for metric in SAME:
            assert here[metric] == again[here["step"]][metric], (here["step"], metric)
    assert trained[-1]["kl_loss"] > 0
    want = load_file(tmp_path / "again" / "model.safetensors")
    same_weights(run / "model", want)

    root = str(run / "checkpoints")
    for result in runs.miles("checkpoint", "verify", root):
        assert all(check["problem"] is None for check in result["checks"]), result
    runs.miles("checkpoint", "export", root, str(tmp_path / "merged"))
    same_weights(tmp_path / "merged", want)
    runs.miles("checkpoint", "export", root, str(tmp_path / "adapter"), "--adapter")
    (base,) = (runs.directory / ".cache").glob("model-untrained-*")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    begun = logits(model)
    adapted = logits(PeftModel.from_pretrained(model, tmp_path / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32))
    scale = begun.abs().max().item()
    assert (adapted - merged).abs().max().item() < 1e-5 * scale
    assert (adapted - begun).abs().max().item() > 1e-3 * scale


def same_weights(directory: Path, want: dict[str, torch.Tensor]) -> None:
    got = load_file(directory / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in got.items())
