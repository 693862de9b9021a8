"""Conversion, export and save of a random model against a plain copy of the same bytes.

    .venv/bin/python benchmarks/checkpoint.py --output /path/on/the/disk --mb 1000

Each part runs in a process of its own, with one thread for arithmetic, on the same disk; the copy
is synced, as everything else is. Prints a table, or one JSON object with `--json`: seconds, CPU
seconds, MB of result a second, their share of the copy's, and how far the memory of the process
rose above what it had before the part began. The page cache is warm for all.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.checkpoints import manifest, store

CHUNK = 4 << 20


def make_model(directory: Path, megabytes: int, dtype: str) -> None:
    """A random Qwen3 of about this size, in files of at most 500 MB."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, width = 1024, 2 if dtype == "bfloat16" else 4
    layer = hidden * (2 * hidden + 2 * hidden // 2 + 3 * 3 * hidden) + 4 * hidden
    vocabulary = 8192
    layers = max(1, math.ceil((megabytes * 1e6 / width - vocabulary * hidden) / layer))
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(config).save_pretrained(directory, max_shard_size="500MB")


def size_of(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def peak_rss() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy(source: Path, target: Path) -> None:
    """Copy a directory's files, synced."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_file():
            with open(path, "rb") as reader, open(target / path.name, "wb") as writer:
                shutil.copyfileobj(reader, writer, CHUNK)
                writer.flush()
                os.fsync(writer.fileno())


def measure(part: Callable[[], Any]) -> dict[str, float]:
    """Seconds, seconds of CPU time and growth of the peak memory while `part` runs."""
    before, cpu, started = peak_rss(), time.process_time(), time.monotonic()
    part()
    return {
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": (peak_rss() - before) / 1e6,
    }


def run_copy(source: Path, target: Path) -> dict[str, float]:
    """The plain copy."""
    return measure(lambda: copy(source, target))


def run_convert(hf: Path, target: Path) -> dict[str, float]:
    """Conversion with the tensors read back and compared."""
    from miles_core.checkpoints import convert
    from miles_core.modeling import gpt, shard_map, sharded_files  # noqa: F401 - not measured

    return measure(lambda: convert.convert_to_torch_dist(hf, target, check="tensors"))


def run_export(source: Path, target: Path) -> dict[str, float]:
    """Export in files of at most 500 MB; the source's digests are checked."""
    from miles_core.checkpoints.export import export_to_hf
    from miles_core.modeling import gpt, shard_map, sharded_files  # noqa: F401 - not measured

    return measure(lambda: export_to_hf(source, target, shard_bytes=500_000_000))


def run_save(converted: Path, target: Path) -> dict[str, float]:
    """A trainer's checkpoint (weights and two moments, float32): written, sealed and published."""
    from miles_core.training.config import TrainerConfig
    from miles_core.training.worker import TrainerWorker

    worker = TrainerWorker(TrainerConfig(kl_loss_coef=0.0))
    worker.init(str(converted))

    def save() -> None:
        directory = store.begin(target, 1)
        worker.save(str(directory))
        store.publish(directory, target, 1, {}, keep=1)

    result = measure(save)
    worker.close()
    return result


def run_check(source: Path, target: Path) -> dict[str, float]:
    """Digests of a whole checkpoint, as a resume computes them."""
    return measure(lambda: manifest.verify(source))


PARTS = {
    "copy": run_copy,
    "convert": run_convert,
    "export": run_export,
    "save": run_save,
    "check": run_check,
}


def _child(name: str, source: str, target: str, pipe: Any) -> None:
    pipe.send(PARTS[name](Path(source), Path(target)))


def in_process(name: str, source: Path, target: Path) -> dict[str, float]:
    """Run a part in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, str(source), str(target), theirs))
    process.start()
    theirs.close()
    try:
        result: dict[str, float] = ours.recv()
    finally:
        process.join()
    return result


def best(name: str, source: Path, target: Path, repeats: int) -> dict[str, float]:
    """The fastest of several runs; the result of the last one stays."""
    results = []
    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        results.append(in_process(name, source, target))
    return min(results, key=lambda result: result["seconds"])


def compare(work: Path, name: str, source: Path, repeats: int) -> dict[str, Any]:
    """A part, and the plain copy of what it wrote (for `check`: of what it read)."""
    target = work / name
    result: dict[str, Any] = dict(best(name, source, target, repeats))
    written = source if name == "check" else target
    plain = best("copy", written, work / "copy", repeats)
    shutil.rmtree(work / "copy")
    result["mb"] = size_of(written) / 1e6
    result["mb_per_s"] = result["mb"] / result["seconds"]
    result["copy_mb_per_s"] = result["mb"] / plain["seconds"]
    result["copy_cpu_seconds"] = plain["cpu_seconds"]
    result["share_of_copy"] = result["mb_per_s"] / result["copy_mb_per_s"]
    return result


def run(work: Path, megabytes: int, dtype: str, repeats: int) -> dict[str, Any]:
    """All parts, one after the other."""
    context = multiprocessing.get_context("spawn")
    hf = work / "hf"
    maker = context.Process(target=make_model, args=(hf, megabytes, dtype))
    maker.start()
    maker.join()
    results = {"convert": compare(work, "convert", hf, repeats)}
    results["export"] = compare(work, "export", work / "convert", repeats)
    shutil.rmtree(work / "export")
    results["save"] = compare(work, "save", work / "convert", repeats)
    results["check"] = compare(work, "check", work / "save" / "iter_0000001", repeats)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--mb", type=int, default=1000, help="size of the model's weights (1000)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of these counts (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as work:
        results = run(Path(work), args.mb, args.dtype, args.repeats)
    if args.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return 0
    print(
        f"{'part':<8} {'MB':>8} {'seconds':>8} {'MB/s':>7} {'copy MB/s':>10} {'share':>6} peak MB"
    )
    for name, r in results.items():
        print(
            f"{name:<8} {r['mb']:>8.0f} {r['seconds']:>8.2f} {r['cpu_seconds']:>7.2f} "
            f"{r['mb_per_s']:>7.0f} {r['copy_mb_per_s']:>10.0f} {r['share_of_copy']:>6.2f} "
            f"{r['peak_mb']:>8.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
