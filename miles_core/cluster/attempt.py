"""One attempt of a run: services and ranks up, then step after step until the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from miles_core.agent_server.client import AgentServerClient
from miles_core.cluster.addresses import session_host
from miles_core.cluster.evaluation import Evaluation
from miles_core.cluster.fleet import Fleet, Inputs
from miles_core.cluster.guard import Guard, Interrupted
from miles_core.cluster.no_signal import NoSignal
from miles_core.cluster.saving import Saver, resume_point
from miles_core.cluster.tracking import Tracker
from miles_core.cluster.trainers import TrainerGroup
from miles_core.cluster.weight_push import PushSettings, WeightPush
from miles_core.config.algorithm_checks import WITHOUT_GROUPS
from miles_core.data.source import PromptSource, Row
from miles_core.rollout.dump import DamagedRollout, read_rollout, write_rollout
from miles_core.rollout.loop import RolloutLoop, journal_start
from miles_core.rollout.metrics import rollout_metrics
from miles_core.rollout.place import TrialRunner
from miles_core.runs import fold, journal, retention
from miles_core.runs.directory import RunDir
from miles_core.runs.metrics import append_metrics
from miles_core.sessions.client import SessionClient
from miles_core.training.config import trainer_config

log = logging.getLogger("miles.attempt")


class Attempt:
    """State of one Ray job of a run."""

    def __init__(self, run: RunDir, events: journal.Journal, number: int):
        self.run_dir = run
        self.config = run.load_config()
        self.inputs = Inputs.load(run)
        self.number = number
        self.step = 0
        self._journal = events
        self._stop = asyncio.Event()
        self._fleet = Fleet(run, self.config, self.inputs, number, self._alarm)
        self._trained: dict[str, Any] | None = None
        self._tracker = Tracker(
            self.config.tracking,
            run.path.name,
            run.path / "wandb",
            self.config.model_dump(mode="json"),
        )
        self._evaluation = Evaluation(
            self.config.rollout, self.inputs.eval_rows, run, events, self._tracker
        )
        self._trainers: TrainerGroup | None = None
        self._agents: AgentServerClient | None = None
        self._no_signal = NoSignal(
            self.config.rollout.no_signal_steps,
            events,
            whole_step=self.config.training.advantage_estimator in WITHOUT_GROUPS,
        )

    def _alarm(self, kind: str, detail: str) -> None:
        self._journal.append("alarm", kind=kind, detail=detail)

    # ---- start and end ---------------------------------------------------------------

    def interrupt(self) -> None:
        """Ask the attempt to end; called by a signal handler."""
        log.warning("asked to stop")
        self._fleet.expect_end()  # who asked may be ending the services too
        self._stop.set()

    async def close(self) -> None:
        """End everything that this attempt started; the sandboxes of its trials too."""
        if self._trainers is not None:
            self._trainers.kill()
        if self._agents is not None:
            for instance in self._fleet.session_instances:
                with contextlib.suppress(Exception):  # best effort: leases end them otherwise
                    async with asyncio.timeout(15):
                        await self._agents.flush(instance)
        self._fleet.stop()
        self._tracker.finish()

    async def run(self) -> None:
        """Train all steps that are left."""
        checkpoint = resume_point(self.run_dir)
        self.step = 0 if checkpoint is None else checkpoint.iteration
        source = PromptSource(
            self.inputs.rows, seed=self.config.run.seed, shuffle=self.config.data.shuffle
        )
        rollout = self.config.rollout
        self._journal.append(
            "run_started",
            attempt=self.number,
            from_step=self.step,
            steps_total=rollout.num_rollout,
            rows=len(source),
            groups_per_step=rollout.rollout_batch_size,
            group_size=rollout.n_samples_per_prompt,
        )
        if checkpoint is not None:
            for passed_over in checkpoint.passed_over:
                self._journal.append("alarm", kind="checkpoint_damaged", detail=passed_over)
            source.restore(checkpoint.state["cursor"])
            self._reconcile(checkpoint.state)
        async with self._stage("services"):
            await self._start_services(None if checkpoint is None else str(checkpoint.path))
        try:
            await self._steps(source)
        except Interrupted:
            # A save needs the ranks alone; who asked to stop may have ended the services too.
            self._fleet.stop()
            if self._trained is not None:
                await self._save(self._trained)
            await self._saver.settle()
            raise
        finally:
            await self._saver.leave()

    def _reconcile(self, state: dict[str, Any]) -> None:
        """Journal a step whose checkpoint was published just before a crash."""
        done = fold.fold(journal.read(self.run_dir.journal)).rewards
        last = self.step - 1
        if last >= 0 and last not in done:
            self._journal_trained(last, state["metrics"])

    async def _start_services(self, load: str | None) -> None:
        training = self.config.training
        self._fleet.start()
        self._trainers = TrainerGroup(
            trainer_config(
                training, self.config.run.seed, temperature=self.config.rollout.temperature
            ),
            training.num_trainer_ranks,
            self.config.cluster.rank_silence_s,
        )
        self._guard = Guard(self._stop, [self._fleet.watch, self._trainers.watch])
        critic = self.config.model.critic_load
        setup = self._trainers.setup(
            load or self.inputs.torch_dist,
            self.inputs.ref_torch_dist,
            None if critic is None else str(critic),
        )
        await asyncio.gather(self._guard.wait(setup), self._fleet.engines.wait())
        self._fleet.record("ranks", await self._trainers.processes())
        self._saver = Saver(
            self._trainers,
            self.run_dir.checkpoints,
            self._journal,
            keep=self.config.run.keep_checkpoints,
            background=self.config.checkpoint.async_save,
            published=self.step,
        )
        session_urls = await self._fleet.wait_sessions()
        self._weights = WeightPush(
            self._fleet.engines,
            self._trainers,
            PushSettings(
                training.update_weight_transport,
                training.check_weight_update_equal,
                self.run_dir.weights_dir,
            ),
        )
        self._sessions = SessionClient(
            session_urls,
            self.inputs.session_token,
            external_host=session_host(
                self.config.sessions, os.environ, ray.util.get_node_ip_address
            ),
        )
        self._agents = AgentServerClient(self.inputs.agent_server_url, self.inputs.agent_token)
        await self._flush_earlier_attempts(self._agents)
        health = await self._agents.health()
        wanted = self.config.rollout.max_concurrent_trials or (
            self.config.rollout.rollout_batch_size * self.config.rollout.n_samples_per_prompt
        )
        runner = TrialRunner(
            self.config, self._agents, self._sessions, journal_start(self._journal)
        )
        self._rollout = RolloutLoop(
            self.config.rollout,
            runner,
            self._journal,
            self.run_dir.trials,
            concurrency=max(1, min(wanted, health.capacity)),
        )

    async def _flush_earlier_attempts(self, agents: AgentServerClient) -> None:
        """Free the sandboxes that a killed attempt left behind."""
        for instance in self._fleet.earlier_instances():
            ended = await agents.flush(instance)
            if ended:
                log.info("ended %d trials of an earlier attempt", len(ended))

    # ---- steps -----------------------------------------------------------------------

    async def _steps(self, source: PromptSource) -> None:
        assert self._trainers is not None
        total = self.config.rollout.num_rollout
        await self._push()
        await self._evaluate()
        while self.step < total:
            rows = source.draw(self.config.rollout.rollout_batch_size)
            path = await self._roll_out(rows)
            self._saver.check()
            metrics = await self._train(path)
            self.step += 1
            self._trained = {
                "iteration": self.step,
                "weight_version": self.step + 1,
                "cursor": source.state(),
                "metrics": metrics,
            }
            if self.step % self.config.checkpoint.save_interval == 0 or self.step == total:
                await self._save(self._trained)
            self._journal_trained(self.step - 1, metrics)
            if self._stop.is_set() and self.step < total:
                raise Interrupted
            if self.step < total or self._evaluation.due(self.step):
                await self._push()
                await self._evaluate()
            self._prune()
        await self._export()
        await self._guard.wait(self._saver.settle())
        self._prune()

    async def _roll_out(self, rows: list[Row]) -> Path:
        """The step's dump: of an earlier attempt, when it holds these very rows, else made now."""
        path = self.run_dir.rollout_path(self.step)
        ids = [row.instance_id for row in rows]
        if path.exists() and self._dumped_rows(path) == ids:
            self._journal.append("stage", name="rollout", state="skipped", step=self.step)
            return path
        async with self._stage("rollout"):
            work = self._weights.beside(self._rollout.run_step(self.step, rows))
            groups = await self._guard.wait(work, interruptible=True)
            await asyncio.to_thread(write_rollout, path, self.step, self.step + 1, ids, groups)
        append_metrics(self.run_dir.metrics, self.step, "rollout", rollout_metrics(groups))
        return path

    def _dumped_rows(self, path: Path) -> list[str] | None:
        """Rows of a dump; None, with an alarm, for a damaged one: the step is rolled out anew."""
        try:
            rows: list[str] = read_rollout(path)["rows"]
        except DamagedRollout as error:
            self._journal.append("alarm", kind="rollout_damaged", detail=str(error))
            return None
        return rows

    async def _evaluate(self) -> None:
        """Run the held-out rows under the current weights, when that is due."""
        evaluation = self._evaluation
        if not evaluation.due(self.step):
            return
        async with self._stage("evaluate"):
            work = self._rollout.evaluate(self.step, evaluation.rows, evaluation.samples)
            trajectories = await self._guard.wait(self._weights.beside(work), interruptible=True)
        evaluation.record(self.step, trajectories)

    async def _train(self, path: Path) -> dict[str, Any]:
        assert self._trainers is not None
        async with self._stage("train"):
            directory = self.run_dir.train_dir(self.step)
            metrics: dict[str, Any] = await self._guard.wait(
                self._trainers.call("train", self.step, str(path), str(directory))
            )
        del metrics["step"]
        append_metrics(self.run_dir.metrics, self.step, "train", metrics)
        rewards = [
            [trajectory["reward"] for trajectory in group["trajectories"]]
            for group in read_rollout(path)["groups"]
        ]
        self._no_signal.record(self.step, rewards)
        flat = [reward for group in rewards for reward in group]
        metrics = {**metrics, "reward_mean": sum(flat) / len(flat)}
        self._tracker.log(self.step, metrics)
        return metrics

    def _journal_trained(self, step: int, metrics: dict[str, Any]) -> None:
        self._journal.append("step_trained", step=step, metrics=metrics)

    async def _save(self, state: dict[str, Any]) -> None:
        async with self._stage("save"):
            await self._guard.wait(self._saver.save(state))

    async def _push(self) -> None:
        """Give the engines the trainer's weights under the version `step + 1`."""
        version = self.step + 1
        async with self._stage("push"):
            # A stop ends it: engines that were asked to stop too would take no weights.
            report = await self._guard.wait(self._weights.push(version), interruptible=True)
        self._journal.append("weights_pushed", version=version, step=self.step, **asdict(report))

    async def _export(self) -> None:
        """The trained policy as a Hugging Face directory, `RUN/model`."""
        assert self._trainers is not None
        final = self.run_dir.path / "model"
        partial = final.with_name(".model.partial")
        shutil.rmtree(partial, ignore_errors=True)
        await self._guard.wait(self._trainers.call("export_hf", str(partial)))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        shutil.rmtree(self.run_dir.weights, ignore_errors=True)

    def _prune(self) -> None:
        state = fold.fold(journal.read(self.run_dir.journal))
        retention.prune(
            self.run_dir,
            steps_done=self.step,
            resume_from=self._saver.published,
            trial_steps=state.trial_steps,
            keep_dumps=self.config.run.keep_dumps,
            keep_trials=self.config.run.keep_trials,
        )

    # ---- helpers ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _stage(self, name: str) -> AsyncIterator[None]:
        """Journal the begin and end of a stage."""
        started = time.monotonic()
        self._journal.append("stage", name=name, state="started", step=self.step)
        yield
        seconds = round(time.monotonic() - started, 3)
        self._journal.append("stage", name=name, state="ended", step=self.step, seconds=seconds)
        log.info("step %d: %s took %.1f s", self.step, name, seconds)
