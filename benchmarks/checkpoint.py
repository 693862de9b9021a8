"""Conversion, export and save of a random model against a plain copy of the same bytes.

    .venv/bin/python benchmarks/checkpoint.py --output /path/on/the/disk --mb 1000

Each part runs in a process of its own, with one thread for arithmetic, on the same disk, in turns
with a copy of what it wrote; the copy is synced, as everything else is. Prints a table, or one JSON
object with `--json`: seconds, CPU seconds, MB of result a second, their share of the copy's, and
how far the memory of the process rose above what it had before the part began. The page cache is
warm for all, modules are imported before the clock starts, and memory for as many bytes as the part
writes was in use a moment before: a virtual machine may have given free memory back to its host,
and getting it again can take several times as long as writing to it.

convert          what a user gets by default: the source is fingerprinted; every tensor is
                 written, read back and compared bit for bit; logits of the first layers are
                 compared with transformers'
convert-tensors  the same with `--check tensors`: what it is faster by is the comparison of logits
export           a Hugging Face directory in files of at most 500 MB; digests of the source checked
save             a trainer's checkpoint (16 bytes a weight) written, synced, sealed and published
pause            the same in the background: the time during which the ranks may not train;
                 `seconds_published` is the time until it is published when nothing trains
check            digests of a whole checkpoint, as a resume computes them
load             a resume: model, optimizer and random state read into a trainer
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.checkpoints import manifest, store

STATE = 8  # bytes of a trainer's checkpoint for each byte of a bfloat16 model


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
    """Copy a directory's files, synced; the kernel moves the bytes."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
            manifest.sync(target / path.name)


def _wake_memory(size: int) -> None:
    """Use twice `size` bytes for a moment, in a process of its own: the host gives them then.

    NumPy asks for huge pages, which a plain allocation would not get back.
    """
    code = f"import numpy; numpy.ones({2 * size}, numpy.uint8)"
    subprocess.run([sys.executable, "-c", code], check=True)


def measure(part: Callable[[], Any], written: int) -> dict[str, float]:
    """Seconds, seconds of CPU time and growth of the peak memory while `part` runs, which writes
    about this number of bytes."""
    _wake_memory(written)
    before, cpu, started = peak_rss(), time.process_time(), time.monotonic()
    part()
    return {
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": (peak_rss() - before) / 1e6,
    }


def run_copy(source: Path, target: Path) -> dict[str, float]:
    """The plain copy."""
    return measure(lambda: copy(source, target), size_of(source))


def run_convert(hf: Path, target: Path, check: Any = "auto") -> dict[str, float]:
    """Conversion, verified as by default."""
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401 - not measured

    from miles_core.checkpoints import convert
    from miles_core.modeling import gpt, shard_map, shard_reader  # noqa: F401 - not measured

    return measure(lambda: convert.convert_to_torch_dist(hf, target, check=check), size_of(hf))


def run_convert_tensors(hf: Path, target: Path) -> dict[str, float]:
    """Conversion, verified by the tensors alone."""
    return run_convert(hf, target, "tensors")


def run_export(source: Path, target: Path) -> dict[str, float]:
    """Export in files of at most 500 MB; the source's digests are checked."""
    from miles_core.checkpoints.export import export_to_hf
    from miles_core.modeling import gpt, shard_map, shard_reader  # noqa: F401 - not measured

    return measure(lambda: export_to_hf(source, target, shard_bytes=500_000_000), size_of(source))


def _worker(load: Path | None = None) -> Any:
    from miles_core.training.config import TrainerConfig
    from miles_core.training.worker import TrainerWorker

    worker = TrainerWorker(TrainerConfig(kl_loss_coef=0.0))
    if load is not None:
        worker.init(str(load))
    return worker


def run_save(converted: Path, target: Path) -> dict[str, float]:
    """A trainer's checkpoint (weights and two moments, float32): written, sealed and published."""
    worker = _worker(converted)

    def save() -> None:
        directory = store.begin(target, 1)
        known = worker.save(str(directory))
        store.publish(directory, target, 1, {}, keep=1, known=known)

    result = measure(save, STATE * size_of(converted))
    worker.close()
    return result


def run_pause(converted: Path, target: Path) -> dict[str, float]:
    """The same in the background: how long a step waits for it."""
    worker = _worker(converted)
    directory = store.begin(target, 1)
    result = measure(lambda: worker.start_save(str(directory), True), STATE * size_of(converted))
    started = time.monotonic()
    known = worker.finish_save()
    store.publish(directory, target, 1, {}, keep=1, known=known)
    result["seconds_published"] = result["seconds"] + time.monotonic() - started
    worker.close()
    return result


def run_load(source: Path, target: Path) -> dict[str, float]:
    """Reading a checkpoint into a trainer, its model built anew."""
    worker = _worker()
    result = measure(lambda: worker.init(str(source)), size_of(source))
    worker.close()
    return result


def run_check(source: Path, target: Path) -> dict[str, float]:
    """Digests of a whole checkpoint, as a resume computes them."""
    return measure(lambda: manifest.verify(source), 0)


PARTS = {
    "copy": run_copy,
    "convert": run_convert,
    "convert-tensors": run_convert_tensors,
    "export": run_export,
    "save": run_save,
    "pause": run_pause,
    "check": run_check,
    "load": run_load,
}
READING = ("check", "load")


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


def compare(work: Path, name: str, source: Path, repeats: int) -> dict[str, Any]:
    """A part in turns with the plain copy of what it wrote (or read); the fastest of each."""
    target = work / name
    runs: dict[str, list[dict[str, float]]] = {"part": [], "copy": []}
    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        runs["part"].append(in_process(name, source, target))
        runs["copy"].append(
            in_process("copy", source if name in READING else target, work / "copy")
        )
        shutil.rmtree(work / "copy")
    fastest, plain = (min(r, key=lambda one: one["seconds"]) for r in runs.values())
    size = size_of(source if name in READING else target) / 1e6
    speed, copied = size / fastest["seconds"], size / plain["seconds"]
    return {
        **fastest,
        "mb": size,
        "mb_per_s": speed,
        "copy_mb_per_s": copied,
        "copy_cpu_seconds": plain["cpu_seconds"],
        "share_of_copy": speed / copied,
    }


def run(work: Path, megabytes: int, dtype: str, repeats: int, only: list[str]) -> dict[str, Any]:
    """The parts in `only` and what they read, one after the other."""
    context = multiprocessing.get_context("spawn")
    hf = work / "hf"
    maker = context.Process(target=make_model, args=(hf, megabytes, dtype))
    maker.start()
    maker.join()
    saved = work / "save" / "iter_0000001"
    sources = {
        "convert": hf,
        "convert-tensors": hf,
        "export": work / "convert",
        "pause": work / "convert",
        "save": work / "convert",
        "check": saved,
        "load": saved,
    }
    wanted = {*only, *(sources[name].relative_to(work).parts[0] for name in only)}
    results = {}
    for name, source in sources.items():
        if name in wanted or (name == "convert" and "save" in wanted):
            results[name] = compare(work, name, source, repeats)
            if name not in ("convert", "save"):
                shutil.rmtree(work / name, ignore_errors=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--mb", type=int, default=1000, help="size of the model's weights (1000)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of these counts (3)")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS)[1:], default=tuple(PARTS)[1:])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as work:
        results = run(Path(work), args.mb, args.dtype, args.repeats, args.only)
    if args.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return 0
    print(
        f"{'part':<16} {'MB':>7} {'seconds':>8} {'CPU s':>7} {'copy CPU s':>10} {'MB/s':>6} "
        f"{'copy MB/s':>9} {'share':>6} {'peak MB':>8}"
    )
    for name, r in results.items():
        print(
            f"{name:<16} {r['mb']:>7.0f} {r['seconds']:>8.2f} {r['cpu_seconds']:>7.2f} "
            f"{r['copy_cpu_seconds']:>10.2f} {r['mb_per_s']:>6.0f} {r['copy_mb_per_s']:>9.0f} "
            f"{r['share_of_copy']:>6.2f} {r['peak_mb']:>8.0f}"
        )
    if "pause" in results:
        print(f"published after a pause: {results['pause']['seconds_published']:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
