"""A weight push by each transport against a plain copy of the same bytes in memory.

    .venv/bin/python benchmarks/weight_push.py --mb 500 --engines 1

One trainer rank (this process) and embedded engines (processes of their own) on one machine, with
one thread for arithmetic each, and a random Qwen3 of about `--mb` megabytes in float32. Each
transport pushes `--rounds` times after a first time that does not count; the fastest is told, and
the first push of an engine is told apart. Prints a table, or one JSON object with `--json`:
seconds, MB a second, their share of the copy's, and how far the memory of trainer and engine rose
above what it had before the push (the engine keeps its old weights until the new ones are whole).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_core.cluster.engine_pool import EnginePool
from miles_core.cluster.services import Service
from miles_core.cluster.weight_push import PushSettings, WeightPush
from miles_core.training.config import TrainerConfig
from miles_core.training.worker import TrainerWorker

TRANSPORTS = ("shm", "broadcast", "disk")


def make_model(directory: Path, megabytes: int) -> None:
    """A random Qwen3 of about this size."""
    hidden, vocabulary = 1024, 8192
    layer = hidden * (2 * hidden + 2 * hidden // 2 + 3 * 3 * hidden)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=max(1, math.ceil((megabytes * 1e6 / 4 - vocabulary * hidden) / layer)),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


class Memory:
    """How far a process rises above what it has now."""

    def __init__(self, pid: int | str) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def rise(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise OSError(f"{self._folder}/status does not tell {name}")


class Trainers:
    """One rank in this process, called as the ranks of a run are."""

    def __init__(self, worker: TrainerWorker) -> None:
        self._worker = worker

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._worker, method), *args)


def copy_seconds(size: int, rounds: int) -> float:
    """The fastest of some copies of so many bytes between two buffers that are in memory."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


async def measure(
    transport: str, worker: TrainerWorker, model: Path, scratch: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Pushes by one transport."""

    async def route(urls: list[str], version: int) -> None:
        return None

    def alarm(kind: str, detail: str) -> None:
        raise SystemExit(f"{kind}: {detail}")

    argv = ["miles_core.engines.server", "--model", str(model), "--port", "0"]
    argv += ["--load-format", "dummy", "--max-total-tokens", "1024"]
    env = {"OMP_NUM_THREADS": "1"}
    services = [
        Service(f"engine-{i}", list(argv), scratch / transport, env) for i in range(args.engines)
    ]
    pool = EnginePool(services, [], alarm, route)
    settings = PushSettings(transport, args.check, lambda v: scratch / "weights" / f"v{v}")
    push = WeightPush(pool, Trainers(worker), settings)
    pool.start()
    try:
        await pool.wait()
        first = await push.push(1)
        seconds, trainer_rise, engine_rise = [], 0, 0
        for version in range(2, 2 + args.rounds):
            pid = json.loads(services[0].ready_file.read_text())["pid"]
            trainer, engine = Memory("self"), Memory(pid)
            seconds.append((await push.push(version)).seconds)
            trainer_rise = max(trainer_rise, trainer.rise())
            engine_rise = max(engine_rise, engine.rise())
    finally:
        pool.stop()
    return {
        "bytes": first.bytes,
        "first_seconds": first.seconds,
        "seconds": min(seconds),
        "trainer_rise": trainer_rise,
        "engine_rise": engine_rise,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=500, help="megabytes of weights")
    parser.add_argument("--bucket-mb", type=int, default=64, help="megabytes of a bucket")
    parser.add_argument("--engines", type=int, default=1, help="engines that are pushed to")
    parser.add_argument("--rounds", type=int, default=3, help="pushes that count")
    parser.add_argument("--check", action="store_true", help="compare digests of what is served")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="weight-push-") as folder:
        scratch = Path(folder)
        make_model(scratch / "hf", args.mb)
        worker = TrainerWorker(
            TrainerConfig(update_weight_buffer_size=args.bucket_mb * 10**6, kl_loss_coef=0.0)
        )
        worker.init_from_hf(str(scratch / "hf"))
        rows = {
            name: asyncio.run(measure(name, worker, scratch / "hf", scratch, args))
            for name in TRANSPORTS
        }
        worker.close()
    size = rows["shm"]["bytes"]
    rows["copy"] = {"bytes": size, "seconds": copy_seconds(size, args.rounds)}
    for row in rows.values():
        row["mb_per_second"] = row["bytes"] / 1e6 / row["seconds"]
        row["of_copy"] = rows["copy"]["seconds"] / row["seconds"]
    if args.json:
        print(json.dumps({"bucket_mb": args.bucket_mb, "engines": args.engines, "rows": rows}))
        return
    print(f"{size / 1e6:.0f} MB, buckets of {args.bucket_mb} MB, {args.engines} engines")
    print("transport   first s   later s      MB/s   of copy   trainer +MB   engine +MB")
    for name, row in rows.items():
        rises = "".join(f"{row.get(k, 0) / 1e6:13.0f}" for k in ("trainer_rise", "engine_rise"))
        print(
            f"{name:10}{row.get('first_seconds', 0):9.2f}{row['seconds']:10.2f}"
            f"{row['mb_per_second']:10.0f}{row['of_copy']:10.2f}{rises}"
        )


if __name__ == "__main__":
    main()
