"""Which agent a request names, and the configuration with which Harbor builds it."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import traceback
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.model_api_format import ModelApiFormat
from harbor.models.trial.config import AgentConfig

from miles_core.agent_server.agents.address import inside, relayed
from miles_core.agent_server.agents.job import AgentJob
from miles_core.agent_server.agents.mini import MINI
from miles_core.agent_server.agents.terminus import TERMINUS
from miles_core.agent_server.protocol import PROBE, TrialRequest
from miles_core.agent_server.settings import SETUP_LIMIT_S, ServerSettings
from miles_core.agent_server.tasks import TaskProblem
from miles_core.verdicts import Cause

HOST_AGENTS = ("oracle", "nop", PROBE)
"""Agents that call no model."""

BUILT_IN = (MINI, TERMINUS, *HOST_AGENTS)
AGENTS = (*BUILT_IN, *(name for name in AgentFactory.registered_names() if name not in BUILT_IN))
"""All names of agents; besides these, `module:Class` names a subclass of Harbor's BaseAgent."""

NO_KEY = "none"
"""The API key of an endpoint that needs none: a session is named by a secret in its URL."""


def check(request: TrialRequest) -> None:
    """Raise TaskProblem for an agent that is not known or that lacks a model endpoint."""
    name = request.agent_name
    if name not in AGENTS and ":" not in name:
        near = difflib.get_close_matches(name, AGENTS, n=1, cutoff=0.4)
        meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(BUILT_IN)}"
        raise _refused(f"no agent {name!r}{meant} (or a class of your own as 'module:Class')")
    if name in AGENTS and name not in HOST_AGENTS and not request.base_url:
        raise _refused(f"{name} needs a base_url")


def _refused(message: str) -> TaskProblem:
    return TaskProblem(Cause.AGENT_SETUP_FAILED, message[:500])


def job_of(request: TrialRequest, settings: ServerSettings) -> AgentJob:
    """The job of the agent that a request names."""
    job = AgentJob(request, settings.agent_config)
    if not _ours(request):
        job.turns = job.tool_calls = job.input_tokens = job.output_tokens = None
    return job


def _ours(request: TrialRequest) -> bool:
    """Whether the agent is one of ours, whose every model call is seen."""
    return request.agent_name in (MINI, TERMINUS)


def relays(request: TrialRequest) -> list[tuple[int, str, int]]:
    """What the sandbox of an agent has to reach: (port inside, host, port); raises TaskProblem."""
    if request.agent_name in (*HOST_AGENTS, TERMINUS) or not request.base_url:
        return []
    try:
        return [relayed(request.base_url)]
    except ValueError as error:
        raise _refused(f"base_url: {error}") from error


async def agent_config(
    trial_id: str, request: TrialRequest, settings: ServerSettings, task_limit_s: float | None
) -> AgentConfig:
    """Harbor's configuration of the agent; raises TaskProblem.

    `task_limit_s` is the time that the task gives the agent. Code of agents that are not ours is
    imported here, on a thread: the event loop serves the other trials meanwhile.
    """
    limit = settings.agent_timeout_s
    values: dict[str, Any] = {
        "max_timeout_sec": limit,
        "override_setup_timeout_sec": SETUP_LIMIT_S,
    }
    if task_limit_s is None:
        values["override_timeout_sec"] = limit
    name = request.agent_name
    if name == PROBE:
        path = "miles_core.agent_server.probe:ProbeAgent"
        return AgentConfig(import_path=path, kwargs={"trial_id": trial_id}, **values)
    if name in HOST_AGENTS:
        return AgentConfig(name=name, **values)
    if name == TERMINUS:
        return AgentConfig(
            import_path=f"{__package__}.terminus:Terminus",
            model_name=request.model,
            skip_model_parsing=True,  # parsing it takes litellm
            kwargs={"trial_id": trial_id},
            **values,
        )
    if name == MINI:
        ours = "mini:MiniSweAgent" if settings.sandbox.ours else "mini_outside:MiniSweAgentOutside"
        path = f"{__package__}.{ours}"
        return AgentConfig(import_path=path, kwargs={"trial_id": trial_id}, **values)
    return await _of_harbor(request, settings, values)


async def _of_harbor(
    request: TrialRequest, settings: ServerSettings, values: dict[str, Any]
) -> AgentConfig:
    """An agent that only Harbor knows, or a class of somebody's own."""
    name = request.agent_name
    values["import_path" if ":" in name else "name"] = name
    values["env"] = {
        "OPENAI_API_KEY": NO_KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    try:
        kind = await asyncio.to_thread(_load, AgentConfig(**values))
    except Exception as error:  # whatever a module of unknown origin does when it is imported
        raise _refused(f"agent {name!r}: {type(error).__name__}: {error}") from error
    url = request.base_url
    if url and settings.sandbox.ours and issubclass(kind, BaseInstalledAgent):
        url = inside(url)
    if url:
        values["env"] |= {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url}
    if kind.MODEL_CONNECTION is None:
        values["skip_model_parsing"] = True
    elif url:
        values["base_url"] = url
        # Without a format Harbor drops the URL when an agent is given a `config`.
        if ModelApiFormat.OPENAI_CHAT_COMPLETIONS in kind.MODEL_CONNECTION.supported_api_formats:
            values["model_api_format"] = ModelApiFormat.OPENAI_CHAT_COMPLETIONS
    return AgentConfig(model_name=request.model, **values)


def _load(config: AgentConfig) -> type[BaseAgent]:
    """Import the class of an agent, and what Harbor needs to build it."""
    kind = AgentFactory.get_agent_class_from_config(config)
    if not issubclass(kind, BaseAgent):
        raise TypeError("not a subclass of harbor.agents.base.BaseAgent")
    if kind.MODEL_CONNECTION is not None:
        importlib.import_module("harbor.llms.litellm_config")  # it parses the name of the model
    return kind


def building_problem(error: Exception) -> TaskProblem | None:
    """The problem that an agent has with its configuration, if `error` of Harbor is one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.name == "_init_agent" for frame in frames):
        return None
    text = " ".join(str(error).split())
    return _refused(f"the agent was not built: {type(error).__name__}: {text}")
