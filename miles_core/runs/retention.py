"""Bounded disk use: what of a run may be deleted, and deleting it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.runs.directory import RunDir


@dataclass
class Pruned:
    """What `prune` deleted."""

    dumps: list[int] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)


def first_kept(steps_done: int, keep: int, resume_from: int) -> int:
    """The first step whose data stays: the newest `keep` trained ones and all a resume needs."""
    return max(0, min(steps_done - keep, resume_from))


def _dump_steps(run: RunDir) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    for folder in (run.rollout_data, run.train_data):
        for path in folder.iterdir() if folder.is_dir() else ():
            name = path.stem if path.suffix == ".pt" else path.name
            if name.isdigit():
                found.setdefault(int(name), []).append(path)
    return found


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prune(
    run: RunDir,
    *,
    steps_done: int,
    resume_from: int,
    trial_steps: Mapping[str, int],
    keep_dumps: int,
    keep_trials: int,
) -> Pruned:
    """Delete dumps and finished trials of old steps.

    `resume_from` is the iteration of the newest good checkpoint (0 without one): a resume starts
    at that step, so nothing of it or later is deleted, however small `keep_*` is. `trial_steps`
    (`RunState.trial_steps`) maps a trial to its step; trials that it does not know stay.
    Checkpoints are not touched: publishing one drops the oldest.
    """
    done = Pruned()
    limit = first_kept(steps_done, keep_dumps, resume_from)
    for step, paths in sorted(_dump_steps(run).items()):
        if step < limit:
            for path in paths:
                _delete(path)
            done.dumps.append(step)
    limit = first_kept(steps_done, keep_trials, resume_from)
    for trial_id, step in trial_steps.items():
        if step < limit:
            folders = [run.trial_dir(trial_id), run.agent_server / trial_id]
            present = [folder for folder in folders if folder.is_dir()]
            for folder in present:
                _delete(folder)
            if present:
                done.trials.append(trial_id)
    return done
