"""mini-swe-agent: the real package's agent loop.

It has a model class of ours, and nothing is installed. In a bubblewrap sandbox it is a fork of a
process that has its code loaded; in any other it stays outside (`mini_outside`).
"""

from __future__ import annotations

import difflib
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, override

import yaml
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from miles_core.agent_server.agents.address import inside
from miles_core.agent_server.agents.job import AgentFailed, AgentJob
from miles_core.agent_server.agents.ours import OurAgent
from miles_core.agent_server.protocol import TrialRequest
from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment
from miles_core.agent_server.sandbox.streams import Completed
from miles_core.verdicts import Cause

MINI = "mini-swe-agent"
TRAJECTORY = "/logs/agent/mini-swe-agent.trajectory.json"

_EXIT_CAUSES = {
    "LimitsExceeded": Cause.TURN_LIMIT,
    "RepeatedFormatError": Cause.MALFORMED_ACTIONS,
    "TimeExceeded": Cause.AGENT_TIMEOUT,
}


def default_agent_config() -> dict[str, Any]:
    """mini-swe-agent's own prompts and limits."""
    text = resources.files("minisweagent").joinpath("config/mini.yaml").read_text()
    config = yaml.safe_load(text)
    config["agent"].pop("mode", None)
    config["agent"]["cost_limit"] = 0.0
    config["model"].pop("model_kwargs", None)
    return config


def load_agent_config(path: Path | None) -> dict[str, Any]:
    """mini-swe-agent's settings, with those of a YAML file over them.

    Raises ValueError for a file that is no mapping of `agent`, `environment` and `model`.
    """
    config = default_agent_config()
    if path is None:
        return config
    given = yaml.safe_load(path.read_text())
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected a mapping with agent, environment and model")
    for section, values in given.items():
        if section not in config or not isinstance(values, dict):
            raise ValueError(f"{path}: section {section!r} is not one of agent, environment, model")
        config[section].update(values)
    config["agent"].pop("mode", None)
    _check(config, path)
    return config


def _check(config: dict[str, Any], path: Path) -> None:
    """Build what the agent in the sandbox will build, so that a wrong key is known at start."""
    from minisweagent.agents.default import AgentConfig
    from minisweagent.environments.local import LocalEnvironmentConfig

    known = {
        "agent": set(AgentConfig.model_fields) - {"output_path"},
        "environment": set(LocalEnvironmentConfig.model_fields),
        "model": {"format_error_template", "observation_template", "timeout", "attempts"},
    }
    for section, names in known.items():
        for key in config[section]:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                meant = f"; did you mean {near[0]}?" if near else ""
                listed = ", ".join(sorted(names))
                raise ValueError(f"{path}: {section}.{key} is not one of {listed}{meant}")
    AgentConfig(**config["agent"])
    LocalEnvironmentConfig(**config["environment"])


def _agent_settings(request: TrialRequest, config: dict[str, Any]) -> dict[str, Any]:
    """The section `agent` of the settings, with the smaller of the two turn limits."""
    agent = dict(config["agent"])
    if request.max_turns is not None:
        limit = int(agent.get("step_limit") or 0)
        agent["step_limit"] = min(limit, request.max_turns) if limit else request.max_turns
    return agent


def mini_job(job: AgentJob, task: str) -> dict[str, Any]:
    """The job of `inside/run_agent.py`."""
    request = job.request
    return {
        "task": task,
        "base_url": inside(str(request.base_url)),
        "agent": _agent_settings(request, job.config),
        "environment": job.config["environment"],
        "model": {
            **job.config["model"],
            "model_name": request.model,
            "model_kwargs": request.sampling_params,
        },
        "output_path": TRAJECTORY,
    }


class MiniSweAgent(OurAgent):
    """mini-swe-agent in a bubblewrap sandbox, forked from where it has been loaded."""

    @staticmethod
    @override
    def name() -> str:
        return MINI

    @override
    def version(self) -> str:
        return version("mini-swe-agent")

    @override
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Run the agent. Returns when the verifier may grade; raises AgentFailed otherwise."""
        job = self._job
        with job.at_work():
            done = await self._work(instruction, environment)
        context.n_input_tokens = job.input_tokens
        context.n_output_tokens = job.output_tokens
        error = done.err.decode(errors="replace").strip()[-400:]
        end = job.events[-1] if job.events else None
        if end is None:
            self._ended_without_word(done.code, error)
        elif done.code != 0:
            cause = Cause(end.get("cause") or Cause.AGENT_CRASHED)
            raise job.fail(cause, str(end.get("detail") or error))
        else:
            job.exit_status = str(end.get("exit_status") or "") or None
            named = end.get("cause")
            job.cause = Cause(named) if named else _EXIT_CAUSES.get(job.exit_status or "")

    async def _work(self, instruction: str, environment: BaseEnvironment) -> Completed:
        """Run the agent to its end, and count its turns meanwhile."""
        if not isinstance(environment, BubblewrapEnvironment):
            raise AgentFailed(Cause.AGENT_SETUP_FAILED, "this agent needs a bubblewrap sandbox")
        return await environment.run_agent(mini_job(self._job, instruction), self._job.on_line)

    def _ended_without_word(self, code: int, error: str) -> None:
        """A signal after a model answer is the doing of the agent's commands: it is graded."""
        if (code > 128 or code < 0) and self._job.turns:
            self._job.cause = Cause.AGENT_CRASHED
            return
        raise self._job.fail(Cause.AGENT_CRASHED, f"the agent ended with {code}: {error}")
