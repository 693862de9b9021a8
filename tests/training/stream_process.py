"""One rank that streams weights in one layout after the other."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_helpers import meet
from trainer_helpers import CONFIG

from miles_core.modeling.hf_weights import HFReader
from miles_core.training.worker import TrainerWorker
from miles_core.weights.digest import tensor_digest
from miles_core.weights.shared import read_payload


def high_water(reset: bool = False) -> int:
    """Most bytes of memory this process has had since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


def stream(worker: TrainerWorker, case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Take every bucket out of shared memory; what differs from the source, and what it took."""
    dtype = case.get("dtype")
    source, names, wrong = HFReader(case["hf"]), [], []
    gc.collect()
    before = high_water(reset=True)
    plan = worker.push_weights("begin", dtype)
    for number, bucket in enumerate(plan["buckets"]):
        answer = worker.push_weights("share", number, 1)
        if rank:
            continue
        tensors = read_payload(answer["payloads"][0])
        assert [(n, list(t.shape)) for n, t in tensors] == [(n, s) for n, s, _ in bucket]
        for name, tensor in tensors:
            names.append(name)
            if case.get("compare", True):
                wanted = source(name).to(tensor.dtype)
                equal = torch.equal(wanted, tensor)
                if not equal or answer["digests"][name] != tensor_digest(wanted):
                    wrong.append(name)
        del tensors
    worker.push_weights("end")
    grown = high_water() - before
    width = 2 if dtype else 4
    sizes = [sum(math.prod(shape) * width for _, shape, _ in b) for b in plan["buckets"]]
    counts = [len(bucket) for bucket in plan["buckets"]]
    return {"wrong": wrong, "names": names, "sizes": sizes, "counts": counts, "grown": grown}


def rank_main(request: dict[str, Any], rank: int, world: int, out: Path) -> dict[str, Any]:
    """What each case streamed."""
    answers = {}
    for name, case in request.items():
        config = replace(CONFIG, kl_loss_coef=0.0, **case["changes"])
        worker = TrainerWorker(config, rank, world, **meet(rank))
        worker.init_from_hf(case["hf"])
        answers[name] = stream(worker, case, rank)
        worker.close()
    return answers
