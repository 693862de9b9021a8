"""One trial from request to verdict: a bare Harbor `Trial`, bounded in time, with no retries."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harbor.models.task.task import Task
from harbor.models.trial.config import (
    AgentConfig,
    EnvironmentConfig,
    TaskConfig,
    TrialConfig,
    VerifierConfig,
)
from harbor.trial.hooks import TrialEvent
from harbor.trial.trial import Trial

from miles_core.agent_server import settings as bounds
from miles_core.agent_server.agents import AGENTS, HOST_AGENTS, JOBS, MINI, AgentJob
from miles_core.agent_server.protocol import Phase, TrialRequest, TrialResult
from miles_core.agent_server.sandbox.cgroups import CgroupTree
from miles_core.agent_server.sandbox.environment import HOSTS, SandboxHost
from miles_core.agent_server.sandbox.forks import Helpers
from miles_core.agent_server.sandbox.system import agent_binds
from miles_core.agent_server.settings import BUBBLEWRAP, ServerSettings
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

    def __init__(self, settings: ServerSettings, base: Path | None, tree: CgroupTree | None):
        self.settings = settings
        self._helpers = Helpers()
        self.tasks = TaskSet(settings.tasks_dir)
        self._base = base
        self._tree = tree

    async def open(self) -> None:
        """Load the agent where it is run from here; raises SandboxError."""
        if self.settings.sandbox == BUBBLEWRAP:
            await self._helpers.start()

    def close(self) -> None:
        """End what `open` started."""
        self._helpers.close()

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
        task = self.tasks.load(request.instance_id)
        self._check(task, request)
        job = AgentJob(request, self.settings.agent_config)
        host = self._host(trial_id, request)
        reached = Phase.ENVIRONMENT

        async def enter(event: object) -> None:
            nonlocal reached
            reached = PHASES[event.event]  # type: ignore[attr-defined]
            on_phase(reached)
            if host is not None:
                await host.enter(reached)

        async def leave(event: object) -> None:
            on_phase(Phase.TEARDOWN)

        JOBS[trial_id] = job
        if host is not None:
            HOSTS[trial_id] = host
        try:
            trial = await self._create(trial_id, task, request)
            for name in PHASES:
                trial.add_hook(name, enter)
            trial.add_hook(TrialEvent.END, leave)
            await _bounded(trial, host, self.settings.trial_timeout_s)
        finally:
            JOBS.pop(trial_id, None)
            HOSTS.pop(trial_id, None)
            if host is not None:
                await host.close()
        names = host.names if host is not None else {}
        directories = (task.paths.task_dir, trial.paths.trial_dir)
        ended = Ended(trial.result, job, reached, *directories, names)
        verdict = decide(ended)
        total = time.monotonic() - started
        status = job.exit_status if verdict.cause is None else None
        return TrialResult.of(trial_id, verdict, metrics(ended, total), status)

    def _check(self, task: Task, request: TrialRequest) -> None:
        if request.agent_name not in AGENTS:
            raise TaskProblem(
                Cause.AGENT_SETUP_FAILED,
                f"no agent {request.agent_name!r}; there are {', '.join(AGENTS)}",
            )
        if request.agent_name == MINI and not request.base_url:
            raise TaskProblem(Cause.AGENT_SETUP_FAILED, f"{MINI} needs a base_url")
        if self.settings.sandbox == BUBBLEWRAP:
            check_for_bubblewrap(task, request.agent_name)

    def _host(self, trial_id: str, request: TrialRequest) -> SandboxHost | None:
        if self._base is None or self._tree is None:
            return None
        relays = []
        if request.agent_name == MINI and request.base_url:
            url = urlsplit(request.base_url)
            port = url.port or (443 if url.scheme == "https" else 80)
            if url.scheme != "http" or not url.hostname:
                raise TaskProblem(
                    Cause.AGENT_SETUP_FAILED, "base_url must be http://HOST:PORT/... for a relay"
                )
            relays.append((port, url.hostname, port))
        return SandboxHost(trial_id, self._base, self._tree, agent_binds(), relays, self._helpers)

    async def _create(self, trial_id: str, task: Task, request: TrialRequest) -> Trial:
        try:
            return await Trial.create(self._config(trial_id, task, request))
        except (TypeError, KeyError, OSError):
            raise
        except Exception as error:  # Harbor refuses in many ways what an environment cannot give
            raise TaskProblem(Cause.SANDBOX_UNSUPPORTED, one_line(error, 500)) from error

    def _config(self, trial_id: str, task: Task, request: TrialRequest) -> TrialConfig:
        build = task.config.environment.build_timeout_sec
        return TrialConfig(
            task=TaskConfig(path=task.paths.task_dir),
            trial_name=trial_id,
            trials_dir=self.settings.trials_dir / trial_id / "harbor",
            agent=self._agent(trial_id, task, request),
            environment=self._environment(trial_id),
            verifier=VerifierConfig(max_timeout_sec=bounds.VERIFIER_LIMIT_S),
            environment_build_timeout_multiplier=min(1.0, bounds.BUILD_LIMIT_S / build),
        )

    def _environment(self, trial_id: str) -> EnvironmentConfig:
        if self.settings.sandbox != BUBBLEWRAP:
            return EnvironmentConfig.model_validate({"type": self.settings.sandbox})
        path = "miles_core.agent_server.sandbox.environment:BubblewrapEnvironment"
        return EnvironmentConfig(import_path=path, kwargs={"trial_id": trial_id})

    def _agent(self, trial_id: str, task: Task, request: TrialRequest) -> AgentConfig:
        limit = self.settings.agent_timeout_s
        values: dict[str, Any] = {
            "max_timeout_sec": limit,
            "override_setup_timeout_sec": bounds.SETUP_LIMIT_S,
        }
        if task.config.agent.timeout_sec is None:
            values["override_timeout_sec"] = limit
        if request.agent_name in HOST_AGENTS:
            values["name"] = request.agent_name
        elif self.settings.sandbox == BUBBLEWRAP:
            values["import_path"] = "miles_core.agent_server.agents:MiniSweAgent"
            values["kwargs"] = {"trial_id": trial_id}
        else:
            values.update(stock_mini(request, self.settings.agent_config))
        return AgentConfig(**values)


def stock_mini(request: TrialRequest, config: dict[str, Any]) -> dict[str, Any]:
    """mini-swe-agent as Harbor installs it in a container that has a network.

    `model_api_format` keeps Harbor from dropping `base_url` when `config` is given.
    """
    agent = dict(config["agent"])
    if request.max_turns is not None:
        agent["step_limit"] = request.max_turns
    model = {**config["model"], "model_kwargs": request.sampling_params}
    return {
        "name": MINI,
        "model_name": request.model,
        "base_url": request.base_url,
        "model_api_format": "openai_chat_completions",
        "kwargs": {
            "session_id_headers": [],
            "config": {"agent": agent, "environment": config["environment"], "model": model},
        },
        "env": {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    }


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
