"""Evaluations of a run: when one is due, on which rows, and what is kept of it."""

from __future__ import annotations

from functools import cached_property

from miles_core.cluster.tracking import Tracker
from miles_core.config.schema import RolloutConfig
from miles_core.data.source import PromptSource, Row
from miles_core.rollout.trajectory import Trajectory
from miles_core.runs import journal
from miles_core.runs.directory import RunDir
from miles_core.runs.metrics import append_metrics


class Evaluation:
    """`path` has the held-out rows, if there are any; each is tried `samples` times."""

    def __init__(
        self,
        config: RolloutConfig,
        path: str | None,
        run: RunDir,
        events: journal.Journal,
        tracker: Tracker,
    ) -> None:
        self._interval, self._last = config.eval_interval, config.num_rollout
        self._run_dir, self._journal, self._tracker = run, events, tracker
        self._path = path
        self.samples = config.n_samples_per_eval_prompt

    @cached_property
    def rows(self) -> list[Row]:
        """The held-out rows, in order."""
        assert self._path is not None
        source = PromptSource(self._path, seed=0, shuffle=False)
        return source.draw(len(source))

    def due(self, step: int) -> bool:
        """Whether the weights after `step` steps are to be evaluated and were not."""
        if self._interval is None or self._path is None:
            return False
        done = {
            event["step"]
            for event in journal.read(self._run_dir.journal)
            if event["event"] == "evaluated"
        }
        return (step == self._last or step % self._interval == 0) and step not in done

    def record(self, step: int, trajectories: list[Trajectory]) -> None:
        """Keep what came out."""
        rewards = [float(t.verdict.reward) for t in trajectories if t.verdict.reward is not None]
        metrics = {
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "trajectories": len(rewards),
            "no_verdict": self.samples * len(self.rows) - len(rewards),
        }
        append_metrics(self._run_dir.metrics, step, "eval", metrics)
        self._journal.append("evaluated", step=step, metrics=metrics)
        self._tracker.log(step, {f"eval/{name}": value for name, value in metrics.items()})
