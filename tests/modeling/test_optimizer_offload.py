"""The optimizer's state in host memory: the same numbers to the last bit, nothing on the device.

There is no GPU here, so "device" and "host" are two copies in one memory; the path is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_helpers import alone, assert_same, assert_same_weights, run_cases
from layout_process import CONFIG, on_a_pretended_gpu
from trainer_helpers import make_hf, make_rollout, weights

from miles_core.modeling.optim_offload import HostState
from miles_core.training.worker import TrainerWorker


@contextmanager
def worker(**changes: Any) -> Iterator[TrainerWorker]:
    with on_a_pretended_gpu():
        made = TrainerWorker(replace(CONFIG, **changes))
        try:
            yield made
        finally:
            made.close()


def steps(worker: TrainerWorker, rollout: Path, count: int) -> list[tuple[float, float]]:
    results = [worker.train(0, str(rollout)) for _ in range(count)]
    return [(r["loss"], r["grad_norm"]) for r in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_changes_no_bit_also_over_a_resume(tmp_path: Path, dtype: str) -> None:
    hf, rollout = make_hf(tmp_path / "hf"), make_rollout(tmp_path / "0.pt")
    with worker(dtype=dtype) as plain:
        plain.init_from_hf(str(hf))
        want = steps(plain, rollout, 4)
        last = weights(plain)
    with worker(dtype=dtype, optimizer_cpu_offload=True) as first:
        first.init_from_hf(str(hf))
        got = steps(first, rollout, 2)
        first.save(str(tmp_path / "saved"))
    for number, offload in enumerate((True, False)):
        with worker(dtype=dtype, optimizer_cpu_offload=offload) as resumed:
            resumed.init(str(tmp_path / "saved"))
            assert got + steps(resumed, rollout, 2) == want, number
            assert all(torch.equal(last[n], v) for n, v in weights(resumed).items())


def test_between_two_steps_the_device_holds_no_state(tmp_path: Path) -> None:
    hf, rollout = make_hf(tmp_path / "hf"), make_rollout(tmp_path / "0.pt")
    with worker(dtype="bfloat16", optimizer_cpu_offload=True) as made:
        made.init_from_hf(str(hf))
        for _ in range(2):
            made.train(0, str(rollout))
            (part,) = made.policy.optimizer._inner.chained_optimizers
            mains = [m for group in part.shard_fp32_from_float16_groups for m in group]
            assert mains and not any(m.untyped_storage().nbytes() for m in mains)
            for param in part.model_param_gbuf_map:
                state = part._get_main_param_and_optimizer_states(param)
                assert state["param"].numel() == param.numel() and state["exp_avg"].any()


def test_it_is_refused_where_it_would_do_nothing(tmp_path: Path) -> None:
    made = TrainerWorker(replace(CONFIG, optimizer_cpu_offload=True))
    try:
        with pytest.raises(ValueError, match="computes on the CPU.* --optimizer-cpu-offload"):
            made.init_from_hf(str(make_hf(tmp_path / "hf")))
    finally:
        made.close()


def test_another_adam_is_refused() -> None:
    class Part:
        optimizer = torch.optim.SGD([torch.zeros(1)])

    with pytest.raises(ValueError, match="needs torch's AdamW"):
        HostState(Part())  # type: ignore[arg-type]


TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_in_every_layout(tmp_path: Path, dtype: str) -> None:
    """As the same layout without offload, bit for bit; and as one process."""
    hf, rollout = make_hf(tmp_path / "hf"), make_rollout(tmp_path / "0.pt")
    half, offload = {"dtype": dtype}, {"optimizer_cpu_offload": True}
    layouts = {"dp": {}, "tp": TP, "pp": PP}
    cases = {
        f"{name}{suffix}": {"hf": str(hf), "changes": {**layout, **half, **extra}}
        for name, layout in layouts.items()
        for suffix, extra in (("", {}), ("-offload", offload))
    }
    got = run_cases(tmp_path, 2, rollout, cases)
    want = alone(hf, rollout, tmp_path / "one", **half)
    for name in layouts:
        plain, offloaded = got[name], got[f"{name}-offload"]
        assert [(m["loss"], m["grad_norm"]) for m in plain] == [
            (m["loss"], m["grad_norm"]) for m in offloaded
        ]
        assert_same(name, offloaded, want, 1e-4 if dtype == "float32" else 0.05)
        assert_same_weights(tmp_path / f"run-{name}", tmp_path / f"run-{name}-offload", 0.0)
