"""CPU seconds per GRPO step and peak memory of the trainer, beside plain transformers and TRL.

    python benchmarks/trainer.py [--repeats 3] [--sampled 1.0] [--json]
    python benchmarks/trainer.py --device cuda [--peak-tflops N] [--json]

All three train the same small random Qwen3 on the same trajectories with one thread each: see
`trainer_contestants.py` for what a step is. Transformers and TRL train on padded rows in the order
in which the trajectories came, ours packs them; a micro-batch has the same limit of tokens for all.
Every one has a process of its own, so that its peak memory is its own, and they take turns: a round
gives one ratio. What counts is CPU time, so that others on the machine disturb less.

No figure is given unless losses and gradient norms of every step agree. TRL is left out where it is
not installed. `--device cuda` measures ours alone on a GPU instead: see `trainer_gpu.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainer_batches import BATCHES, CAP, MODEL, make_model, make_rollout, padded_tokens

TARGETS = {"512": 1.10, "2048": 1.10, "8192": 1.10, "varied": 0.70}
TOLERANCE = 1e-4
"""Relative; of losses, which may be close to zero, at least of 0.1."""


def _memory_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) / 1024


def _reset_peak() -> None:
    """Give freed memory back and forget the peak so far."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def serve(name: str, model: Path, folder: Path) -> None:
    """Child process: answer each line, the name of a batch, with the figures of one step.

    A batch that was not the last one's starts from the model's first weights.
    """
    import torch
    from trainer_contestants import CONTESTANTS

    torch.set_num_threads(1)
    contestant = CONTESTANTS[name]()
    imports = _memory_mb("VmRSS")
    last = None
    for line in sys.stdin:
        batch = line.strip()
        if batch != last:
            _reset_peak()
            contestant.prepare(model, folder / f"{batch}.pt")
            last = batch
        started = time.process_time()
        loss, norm = contestant.step()
        answer = {
            "cpu_s": time.process_time() - started,
            "loss": loss,
            "grad_norm": norm,
            "peak_mb": _memory_mb("VmHWM") - imports,
            "imports_mb": imports,
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Child:
    """A contestant's process."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.name = name
        command = [sys.executable, __file__, "--child", name, str(model), str(folder)]
        settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )

    def step(self, batch: str) -> dict[str, float]:
        """Figures of one step on a batch."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(batch + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()} in {batch}")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate(timeout=30)


@contextmanager
def started(name: str, model: Path, folder: Path) -> Iterator[Child]:
    """A contestant's process, ended at the end."""
    child = Child(name, model, folder)
    try:
        yield child
    finally:
        child.close()


def differences(steps: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Largest difference of a contestant's losses and gradient norms from plain transformers'."""
    found = {}
    for name, own in steps.items():
        pairs = list(zip(own, steps["transformers"], strict=True))
        values = [abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 0.1) for a, b in pairs]
        values += [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs]
        found[name] = max(value if math.isfinite(value) else math.inf for value in values)
    del found["transformers"]
    return found


class Progress:
    """Rounds that are done, and when all will be, on standard error."""

    def __init__(self, batches: list[str], repeats: int) -> None:
        self._work = {name: padded_tokens(BATCHES[name]) * _share(name) for name in batches}
        self._total = sum(self._work.values()) * (repeats + 1)
        self._done, self._started = 0.0, time.monotonic()

    def round(self, batch: str, number: int) -> None:
        """Say that a round of a batch ended."""
        self._done += self._work[batch]
        passed = time.monotonic() - self._started
        left = passed * (self._total / self._done - 1)
        print(f"{batch}: round {number}; about {left:.0f} s left", file=sys.stderr, flush=True)


def _share(batch: str) -> float:
    """Roughly the work of a padded token: attention's grows with the length."""
    return 1 + max(BATCHES[batch]) / 4096


def measure(children: list[Child], batch: str, repeats: int, progress: Progress) -> dict[str, Any]:
    """Rounds of all contestants by turns, after one that warms up. Raises ValueError when their
    numbers differ."""
    steps: dict[str, list[dict[str, float]]] = {child.name: [] for child in children}
    for number in range(repeats + 1):
        first = number % len(children)
        for child in [*children[first:], *children[:first]]:
            steps[child.name].append(child.step(batch))
        progress.round(batch, number)
    differ = differences(steps)
    if max(differ.values()) > TOLERANCE:
        raise ValueError(f"batch {batch}: numbers differ from transformers' by {differ}")
    rounds = {name: own[1:] for name, own in steps.items()}
    lengths = BATCHES[batch]
    result: dict[str, Any] = {
        "batch": batch,
        "trajectories": len(lengths),
        "tokens": sum(lengths),
        "padded_tokens": padded_tokens(lengths),
        "largest_difference": differ,
        "target_ratio": TARGETS[batch],
    }
    for name, own in rounds.items():
        result[name] = {
            "cpu_s": spread([step["cpu_s"] for step in own]),
            "peak_mb": round(max(step["peak_mb"] for step in steps[name]), 1),
            "imports_mb": round(own[0]["imports_mb"], 1),
        }
    for name in rounds:
        if name != "ours":
            pairs = zip(rounds["ours"], rounds[name], strict=True)
            result[name]["ratio"] = spread([a["cpu_s"] / b["cpu_s"] for a, b in pairs])
            peaks = (result["ours"]["peak_mb"], result[name]["peak_mb"])
            result[name]["peak_ratio"] = round(peaks[0] / peaks[1], 3)
    return result


def spread(values: list[float]) -> dict[str, float]:
    """Least, median and greatest of some figures."""
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def run(repeats: int, batches: list[str], share: float) -> dict[str, Any]:
    """Start the contestants and measure every batch."""
    names = ["ours", "transformers"]
    if importlib.util.find_spec("trl") is not None:
        names.append("trl")
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        make_model(home / "model")
        for batch in batches:
            make_rollout(home / f"{batch}.pt", BATCHES[batch], share)
        children = [stack.enter_context(started(n, home / "model", home)) for n in names]
        progress = Progress(batches, repeats)
        results = [measure(children, batch, repeats, progress) for batch in batches]
    return {
        "benchmark": "trainer",
        "unit": "CPU seconds of a GRPO step; MB of resident memory beyond the imports'",
        "model": MODEL,
        "threads": 1,
        "micro_batch_tokens": CAP,
        "sampled_share": share,
        "repeats": repeats,
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load_average_before": round(before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "trl": "trl" in names,
        "results": results,
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    print(f"{result['model']}; 1 thread each")
    print(result["unit"])
    load = f"{result['load_average_before']} before, {result['load_average_after']} after"
    print(f"{result['cpus']} CPUs, load average {load}; {result['repeats']} rounds, medians")
    if not result["trl"]:
        print("TRL is not installed: no rows for it")
    for row in result["results"]:
        print(
            f"{row['batch']}: {row['trajectories']} trajectories, {row['tokens']} tokens"
            f" ({row['padded_tokens']} with padding)"
        )
        for name in ("ours", "transformers", "trl"):
            if name not in row:
                continue
            own = row[name]
            line = f"  {name:12} {own['cpu_s']['median']:7.2f} s, {own['peak_mb']:6.0f} MB"
            if "ratio" in own:
                ratio = own["ratio"]
                line += f"; ours takes {ratio['median']:.2f} ({ratio['min']:.2f} to "
                line += f"{ratio['max']:.2f}) of its time, {own['peak_ratio']:.2f} of its memory"
            if name == "transformers":
                line += f"; target {row['target_ratio']:.2f} of its time"
            print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all (default: 3)")
    parser.add_argument(
        "--batches", nargs="+", choices=BATCHES, default=list(BATCHES), help="default: all"
    )
    parser.add_argument(
        "--sampled",
        type=float,
        default=1.0,
        help="share of the tokens after the prompt that is trained on (default: 1.0, "
        "which spares ours no logits)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--max-tokens-per-gpu", type=int, default=16384, help="with cuda (default: 16384)"
    )
    parser.add_argument("--recompute", action="store_true", help="with cuda: recompute layers")
    parser.add_argument(
        "--peak-tflops", type=float, help="with cuda: dense bfloat16 peak of a GPU not listed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, model, folder = args.child
        serve(name, Path(model), Path(folder))
        return 0
    try:
        if args.device == "cuda":
            import trainer_gpu

            settings = (args.max_tokens_per_gpu, args.recompute, args.peak_tflops)
            result = trainer_gpu.benchmark(args.repeats, *settings)
        else:
            result = run(args.repeats, args.batches, args.sampled)
    except (ValueError, RuntimeError) as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    else:
        (show if args.device == "cpu" else trainer_gpu.show)(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
