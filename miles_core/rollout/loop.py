"""The rollout of one step: rows become groups, groups become trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.config.schema import RolloutConfig
from miles_core.data.source import Row
from miles_core.rollout.outage import OutageGate
from miles_core.rollout.place import TrialRunner
from miles_core.rollout.trajectory import Place, Trajectory, finished_trials
from miles_core.runs.journal import Journal


class EmptyStepError(RuntimeError):
    """No group of a step kept enough members to train on."""


@dataclass
class Group:
    """The trajectories of one row in one step that may be trained on, ordered by member."""

    group_id: str
    instance_id: str
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [float(t.verdict.reward) for t in self.trajectories if t.verdict.reward is not None]


class RolloutLoop:
    """Runs every place of a step, each until it has a verdict or its attempts are used up."""

    def __init__(
        self,
        config: RolloutConfig,
        runner: TrialRunner,
        journal: Journal,
        trials_dir: Path,
        concurrency: int,
    ):
        self._config = config
        self._runner = runner
        self._journal = journal
        self._trials_dir = trials_dir
        self._slots = asyncio.Semaphore(concurrency)
        self._gate = OutageGate(
            window=config.no_verdict_window,
            max_share=config.max_no_verdict_share,
            fail=config.on_outage == "fail",
            wait_s=config.outage_wait_s,
            on_alarm=self._alarm,
        )
        self._ignored: set[str] = set()

    async def run_step(self, step: int, rows: list[Row]) -> list[Group]:
        """The groups of `step` that may be trained on, in the order of `rows`.

        Trajectories that ended before a restart are used, not run again. Raises EmptyStepError
        when no group is left, and OutageError by configuration.
        """
        finished = finished_trials(self._trials_dir, step)
        async with asyncio.TaskGroup() as tasks:
            started = [
                tasks.create_task(self._run_group(step, index, row, finished))
                for index, row in enumerate(rows)
            ]
        groups = [group for task in started if (group := task.result()) is not None]
        if not groups:
            raise EmptyStepError(
                f"step {step}: every group was dropped; see the causes in journal.jsonl and the "
                f"logs of the agent server"
            )
        return groups

    async def evaluate(self, step: int, rows: list[Row], samples: int) -> list[Trajectory]:
        """Trials of held-out rows under the weights of `step`, without those that gave no verdict.

        Nothing of it is trained on. Its group ids are `s0003-e00`, so that a restart finds what
        had ended.
        """
        finished = finished_trials(self._trials_dir, step)
        async with asyncio.TaskGroup() as tasks:
            started = [
                tasks.create_task(
                    self._run_place(
                        Place(step, f"s{step:04d}-e{index:02d}", member, row.instance_id),
                        row,
                        finished,
                    )
                )
                for index, row in enumerate(rows)
                for member in range(samples)
            ]
        return [trajectory for task in started if (trajectory := task.result()) is not None]

    async def _run_group(
        self, step: int, index: int, row: Row, finished: dict[Place, Trajectory]
    ) -> Group | None:
        group = Group(f"s{step:04d}-g{index:02d}", row.instance_id)
        self._journal.append(
            "group_started", step=step, group_id=group.group_id, instance_id=row.instance_id
        )
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(
                    self._run_place(
                        Place(step, group.group_id, member, row.instance_id), row, finished
                    )
                )
                for member in range(self._config.n_samples_per_prompt)
            ]
        group.trajectories = [t for task in members if (t := task.result()) is not None]
        if len(group.trajectories) < self._config.min_group_size:
            reason = f"{len(group.trajectories)} members of {len(members)} have a verdict"
            self._journal.append("group_dropped", step=step, group_id=group.group_id, reason=reason)
            return None
        self._journal.append(
            "group_ready", step=step, group_id=group.group_id, rewards=group.rewards
        )
        return group

    async def _run_place(
        self, place: Place, row: Row, finished: dict[Place, Trajectory]
    ) -> Trajectory | None:
        """The place's trainable trajectory, or None when its attempts are used up."""
        if place in finished:
            self._journal_end(finished[place], reused=True)
            return finished[place]
        used = number = 0
        seen = self._gate.outages
        while used < self._config.max_attempts:
            async with self._slots:
                await self._gate.passed()
                trajectory = await self._runner.run(place, row, number)
            trajectory.save(self._trials_dir)
            self._journal_end(trajectory, reused=False)
            self._tell_ignored(trajectory)
            outages = self._gate.outages
            self._gate.record(trajectory.verdict)
            if trajectory.verdict.trainable:
                return trajectory
            number += 1
            used += 1
            if self._gate.outages > outages or outages > seen:
                # Attempts that fell into an outage say nothing about this place.
                used = 0
            seen = self._gate.outages
        return None

    def _alarm(self, kind: str, detail: str) -> None:
        self._journal.append("alarm", kind=kind, detail=detail)

    def _tell_ignored(self, trajectory: Trajectory) -> None:
        """Alarm, once for each, about what agents ask of the model and no session can do."""
        new = set(trajectory.session.get("ignored_fields", ())) - self._ignored
        if new:
            self._ignored |= new
            task = trajectory.place.instance_id
            detail = f"{', '.join(sorted(new))} in model calls of task {task}: they have no effect"
            self._alarm("fields_ignored", detail)

    def _journal_end(self, trajectory: Trajectory, reused: bool) -> None:
        verdict = trajectory.verdict
        self._journal.append(
            "trial_ended",
            step=trajectory.place.step,
            group_id=trajectory.place.group_id,
            trial_id=trajectory.trial_id,
            kind=str(verdict.kind),
            cause=None if verdict.cause is None else str(verdict.cause),
            detail=verdict.detail,
            reward=verdict.reward,
            seconds=round(trajectory.seconds, 3),
            turns=trajectory.model_calls,
            tokens=trajectory.trained_tokens,
            samples=len(trajectory.samples),
            retries=trajectory.session.get("retries", 0),
            reused=reused,
        )


def journal_start(journal: Journal) -> Callable[[Place, int, str], None]:
    """The callback of a TrialRunner that journals each start."""

    def on_start(place: Place, attempt: int, trial_id: str) -> None:
        journal.append(
            "trial_started",
            step=place.step,
            group_id=place.group_id,
            member=place.member,
            k=attempt,
            trial_id=trial_id,
            instance_id=place.instance_id,
        )

    return on_start
