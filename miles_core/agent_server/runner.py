"""One trial from request to verdict: a bare Harbor `Trial`, bounded in time, with no retries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.task.task import Task
from harbor.models.trial.config import (
    AgentConfig,
    EnvironmentConfig,
    TaskConfig,
    TrialConfig,
    VerifierConfig,
)
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

from miles_core.agent_server import settings as bounds
from miles_core.agent_server.agents import JOBS, choose, leftovers
from miles_core.agent_server.agents.outcome import settle
from miles_core.agent_server.containers import CONTAINERS
from miles_core.agent_server.protocol import Phase, TrialRequest, TrialResult
from miles_core.agent_server.reaper import kinds
from miles_core.agent_server.sandbox.cgroups import CgroupTree
from miles_core.agent_server.sandbox.forks import Helpers
from miles_core.agent_server.sandbox.host import HOSTS, Plan, SandboxHost
from miles_core.agent_server.sandbox.images import Images
from miles_core.agent_server.sandbox.system import agent_binds
from miles_core.agent_server.settings import ServerSettings
from miles_core.agent_server.tasks import TaskProblem, TaskSet, check_for_bubblewrap, one_line
from miles_core.agent_server.verdict import Ended, decide, metrics
from miles_core.verdicts import Cause, Verdict

CANCEL_LIMIT_S = 20.0
"""How long Harbor may take to end a cancelled trial before its sandbox is ended directly."""

PHASES = {
    TrialEvent.START: Phase.ENVIRONMENT,
    TrialEvent.ENVIRONMENT_START: Phase.ENVIRONMENT,
    TrialEvent.AGENT_START: Phase.AGENT,
    TrialEvent.VERIFICATION_START: Phase.VERIFIER,
}


class Runner:
    """Runs trials in the sandboxes of one server."""

    def __init__(self, settings: ServerSettings, images: Images | None, tree: CgroupTree | None):
        self.settings = settings
        self._helpers = Helpers()
        self.tasks = TaskSet(settings.tasks_dir)
        self._images = images
        self._tree = tree

    async def open(self) -> None:
        """Load the agent where it is run from here; raises SandboxError."""
        if self.settings.sandbox.ours:
            await self._helpers.start()

    def close(self) -> None:
        """End what `open` started."""
        self._helpers.close()

    @property
    def cgroups(self) -> list[Path]:
        """Where the cgroups of the sandboxes are; none where they have none."""
        return self._tree.directories if self._tree is not None else []

    async def run(
        self, trial_id: str, request: TrialRequest, on_phase: Callable[[Phase], None]
    ) -> TrialResult:
        """Run one trial; every way in which it can end is a verdict.

        Cancelling this call ends the trial and its sandbox and then raises CancelledError.
        """
        started = time.monotonic()
        try:
            return await self._run(trial_id, request, on_phase, started)
        except TaskProblem as problem:
            verdict = Verdict.no_verdict(problem.cause, str(problem)[:500])
        except TimeoutError:
            limit = self.settings.trial_timeout_s
            verdict = Verdict.no_verdict(Cause.TRIAL_TIMEOUT, f"the trial exceeded {limit:.0f} s")
        except Exception as error:  # a fault of this server must be a verdict that says so
            verdict = Verdict.no_verdict(Cause.INTERNAL_ERROR, one_line(error, 500))
        return TrialResult.of(trial_id, verdict)

    async def _run(
        self,
        trial_id: str,
        request: TrialRequest,
        on_phase: Callable[[Phase], None],
        started: float,
    ) -> TrialResult:
        task = await asyncio.to_thread(self.tasks.load, request.instance_id)
        self._check(task, request)
        job = choose.job_of(request, self.settings)
        host = self._host(trial_id, request)
        reached = Phase.ENVIRONMENT

        async def enter(event: TrialHookEvent) -> None:
            nonlocal reached
            reached = PHASES[event.event]
            on_phase(reached)
            environments = host.environments if host else CONTAINERS.get(trial_id, [])
            await leftovers.enter(reached, job, environments, event.result)
            if host is not None:
                await host.enter(reached)

        async def leave(event: TrialHookEvent) -> None:
            on_phase(Phase.TEARDOWN)

        JOBS[trial_id] = job
        if host is not None:
            HOSTS[trial_id] = host
        try:
            if host is not None:
                plan = Plan.of(task.paths.environment_dir, task.config.environment)
                await host.prepare(plan)
            trial = await self._create(trial_id, task, request)
            _tell_of_setup(trial.agent, on_phase)
            for name in PHASES:
                trial.add_hook(name, enter)
            trial.add_hook(TrialEvent.END, leave)
            await _bounded(trial, host, self.settings.trial_timeout_s)
        finally:
            JOBS.pop(trial_id, None)
            HOSTS.pop(trial_id, None)
            CONTAINERS.pop(trial_id, None)
            if host is not None:
                await host.close()
        names = host.names if host is not None else {}
        settle(job, trial.result, trial.paths.trial_dir)
        ended = Ended(trial.result, job, reached, task, trial.paths.trial_dir, names)
        verdict = decide(ended)
        total = time.monotonic() - started
        status = job.exit_status if verdict.cause is None else None
        space = host.space() if host is not None else {}
        counted = metrics(ended, total).model_copy(update=space)
        return TrialResult.of(trial_id, verdict, counted, status)

    def _check(self, task: Task, request: TrialRequest) -> None:
        choose.check(request)
        if self.settings.sandbox.ours:
            check_for_bubblewrap(task, request.agent_name)

    def _host(self, trial_id: str, request: TrialRequest) -> SandboxHost | None:
        if self._images is None or self._tree is None:
            return None
        relays = choose.relays(request)
        return SandboxHost(trial_id, self._images, self._tree, agent_binds(), relays, self._helpers)

    async def _create(self, trial_id: str, task: Task, request: TrialRequest) -> Trial:
        limit = task.config.agent.timeout_sec
        agent = await choose.agent_config(trial_id, request, self.settings, limit)
        try:
            return await Trial.create(self._config(trial_id, task, agent))
        except Exception as error:  # Harbor refuses in many ways what it cannot give
            problem = choose.building_problem(error)
            if problem is None and isinstance(error, (TypeError, KeyError, OSError)):
                raise
            text = one_line(error, 500)
            named = isinstance(error, UnicodeError)  # a file whose name is no text
            cause = Cause.TASK_INVALID if named else Cause.SANDBOX_UNSUPPORTED
            raise problem or TaskProblem(cause, text) from error

    def _config(self, trial_id: str, task: Task, agent: AgentConfig) -> TrialConfig:
        build = task.config.environment.build_timeout_sec
        sandbox, lifetime = self.settings.sandbox, self.settings.trial_timeout_s
        arguments = kinds.arguments(sandbox, self.settings.owner.id, trial_id, lifetime)
        return TrialConfig(
            task=TaskConfig(path=task.paths.task_dir),
            trial_name=trial_id,
            trials_dir=self.settings.trials_dir / trial_id / "harbor",
            agent=agent,
            environment=EnvironmentConfig.model_validate(sandbox.config(arguments)),
            verifier=VerifierConfig(max_timeout_sec=bounds.VERIFIER_LIMIT_S),
            environment_build_timeout_multiplier=min(1.0, bounds.BUILD_LIMIT_S / build),
        )


def _tell_of_setup(agent: BaseAgent, on_phase: Callable[[Phase], None]) -> None:
    """Call `on_phase` when Harbor begins to set the agent up, of which it has no event.

    An agent may set itself up again later, which is a part of its work.
    """
    set_up, told = agent.setup, False

    async def setup(environment: BaseEnvironment) -> None:
        nonlocal told
        if not told:
            told = True
            on_phase(Phase.AGENT_SETUP)
        await set_up(environment)

    vars(agent)["setup"] = setup


async def _bounded(trial: Trial, host: SandboxHost | None, limit_s: float) -> None:
    """Run a trial for at most `limit_s` seconds; raises TimeoutError after it was ended."""
    running = asyncio.create_task(trial.run(), name=f"harbor-{trial.config.trial_name}")
    try:
        done, _ = await asyncio.wait({running}, timeout=limit_s)
        if done:
            running.result()
            return
    except asyncio.CancelledError:
        await asyncio.shield(_end(running, host))
        raise
    await _end(running, host)
    raise TimeoutError


async def _end(running: asyncio.Task, host: SandboxHost | None) -> None:
    """Cancel a trial; when it does not end, end its sandbox under it."""
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=CANCEL_LIMIT_S)
    if not done and host is not None:
        await host.close()
        await asyncio.wait({running}, timeout=CANCEL_LIMIT_S)
    if running.done():
        with contextlib.suppress(asyncio.CancelledError, Exception):
            running.result()


def quiet_libraries(scratch: Path) -> None:
    """Settings that libraries read from the environment when they are imported.

    No telemetry, no price list from the internet, no banner, nothing in the home directory.
    """
    os.environ.setdefault("HARBOR_TELEMETRY", "off")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(scratch / ".mini-swe-agent"))
