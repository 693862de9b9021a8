"""A small training run that saves, is killed while it saves, and goes on: PLAN (JSON) -> lines.

The modules are imported once; every run is forked, so that one takes a second. PLAN is a list of
runs; each gives one line of JSON on the standard output. A run with `convert` (a Hugging Face
directory) is a conversion.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

import torch  # noqa: E402
from rank_helpers import hold_ports, let_go, meet  # noqa: E402
from syscall_tracer import Point, Tracer  # noqa: E402
from trainer_helpers import CONFIG, make_rollout  # noqa: E402

from miles_core.checkpoints import store  # noqa: E402
from miles_core.checkpoints.convert import convert_to_torch_dist  # noqa: E402
from miles_core.data.source import PromptSource  # noqa: E402
from miles_core.training.worker import TrainerWorker  # noqa: E402

ROWS, DRAWN = 7, 2
NOTICE_S = 10.0  # for ranks that are left alone to go on until they notice it
OPTIONS = {"global_batch_size": 4, "lr_warmup_steps": 4, "lr": 3e-3, "clip_grad": 0.5}
LOGGED = ("loss", "grad_norm", "lr", "kl_loss", "value_loss", "critic_grad_norm", "critic_lr")


def write_rows(path: Path) -> None:
    lines = [{"prompt": "p", "metadata": {"instance_id": f"row-{i}"}} for i in range(ROWS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Run:
    """One rank's part of one attempt."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.root, self.base = Path(plan["root"]), Path(plan["base"])
        self.log = Path(plan["log"])
        changes = {**OPTIONS, **plan.get("changes", {})}
        config = replace(CONFIG, tensor_model_parallel_size=plan["tp"], **changes)
        self.saving: tuple[Path, int, dict[str, Any]] | None = None
        self.worker = TrainerWorker(config, rank, plan["world"], **meet(rank))

    def go(self, wait_for_tracer: Any) -> None:
        checkpoint = store.latest(self.root)
        source = PromptSource(self.plan["rows"], seed=3)
        step = 0
        if checkpoint is not None:
            step = checkpoint.iteration
            source.restore(checkpoint.state["cursor"])
        # a process that resumes does not by chance have the random state that the run had
        seed = 0 if checkpoint is None else os.getpid()
        torch.manual_seed(seed)
        random.seed(seed)
        load = self.base if checkpoint is None else checkpoint.path
        self.worker.init(str(load), str(self.base))
        if self.rank == 0 and checkpoint is not None:
            self._write({"resumed": step, "passed_over": checkpoint.passed_over})
        while step < self.plan["until"]:
            rows = [row.index for row in source.draw(DRAWN)]
            metrics = self._train(step, rows)
            step += 1
            entry = {"step": step - 1, "rows": rows}
            entry |= {name: metrics[name] for name in LOGGED if name in metrics}
            entry["random"] = [torch.rand(1).item(), random.random()]
            if self.rank == 0:
                self._write(entry)
            self._end_save()
            if step in self.plan["saves"]:
                if step == self.plan.get("traced_save"):
                    wait_for_tracer()
                self._begin_save(step, source)
        self._end_save()
        self.worker.close()

    def _train(self, step: int, rows: list[int]) -> dict[str, Any]:
        """A step; a folder says that it trains beside a save in the background."""
        beside = self.saving is not None and self.rank == self.plan.get("traced_rank", 0)
        if beside:
            (self.root / "training").mkdir(exist_ok=True)
        metrics = self.worker.train(step, str(self._rollout(step, rows)))
        if beside:
            (self.root / "training").rmdir()
        return metrics

    def _rollout(self, step: int, rows: list[int]) -> Path:
        path = self.log.with_name(f"rollout-{os.getpid()}.pt")
        return make_rollout(path, step=step, seed=100 * rows[0] + rows[1], groups=1)

    def _begin_save(self, step: int, source: PromptSource) -> None:
        tmp = self.log.with_name("directory")
        if self.rank == 0:
            directory = store.begin(self.root, step)
            tmp.write_text(str(directory))
        torch.distributed.barrier()
        directory = Path(tmp.read_text())
        background = self.plan.get("background", False)
        state = {"cursor": source.state(), "weight_version": step + 1}
        self.saving = directory, step, state
        assert self.worker.start_save(str(directory), background) == background
        if not background:
            self._end_save()

    def _end_save(self) -> None:
        if self.saving is None:
            return
        directory, step, state = self.saving
        self.saving = None
        known = self.worker.finish_save()
        if self.rank == 0:
            store.publish(directory, self.root, step, state, keep=2, known=known)
        torch.distributed.barrier()

    def _write(self, entry: dict[str, Any]) -> None:
        with open(self.log, "a") as file:
            file.write(json.dumps(entry) + "\n")


def _fork_rank(plan: dict[str, Any], rank: int) -> tuple[int, int, int]:
    """The process of a rank, a pipe that says it is about to save, and one that lets it."""
    ready, tell = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:

            def wait_for_tracer() -> None:
                os.write(tell, b"x")
                os.read(wait, 1)

            if "convert" in plan:
                wait_for_tracer()
                out = Path(plan["root"]) / "out"
                convert_to_torch_dist(plan["convert"], out, check="tensors", workers=1)
            else:
                Run(plan, rank).go(wait_for_tracer)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(tell)
    os.close(wait)
    return pid, ready, go


def _living(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _end(pids: list[int], patience_s: float) -> None:
    """Kill what has not ended by itself after some time."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and any(_living(pid) for pid in pids):
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Run all ranks, one of them traced when the plan says so."""
    hold_ports(1)
    ranks = [_fork_rank(plan, rank) for rank in range(plan["world"])]
    let_go()
    tracer = None
    if "traced_save" in plan:
        point = Point(**plan["point"]) if plan.get("point") else None
        traced = plan.get("traced_rank", 0)
        pids = [pid for pid, _, _ in ranks]
        if all(os.read(ready, 1) for _, ready, _ in ranks):
            tracer = Tracer(pids[traced], Path(plan["root"]), point)
            tracer.attach()
            for _, _, go in ranks:
                os.write(go, b"x")
            tracer.follow()
            if tracer.killed:  # as a group of ranks ends when one of them does
                others = [pid for rank, pid in enumerate(pids) if rank != traced]
                _end(others, NOTICE_S if plan.get("others_notice") else 0.0)
    codes = []
    for rank, (pid, ready, go) in enumerate(ranks):
        if tracer is None or rank != plan.get("traced_rank", 0):
            with contextlib.suppress(ChildProcessError):
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(ready)
        os.close(go)
    return {
        "codes": codes,
        "killed": tracer.killed if tracer else False,
        "events": tracer.events if tracer else [],
    }


def main() -> None:
    gc.freeze()  # what was imported is not looked through again in every fork
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
