"""What an agent leaves running in its sandbox.

A process in the background that an agent leaves when it ends is a part of its work: a task may
ask for a server. When the agent was ended, because its time was up or by a failure, nothing of it
lives on beside the verifier; nor does a crowd that would leave the verifier no process to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from harbor.environments.base import BaseEnvironment
from harbor.models.trial.result import TrialResult as HarborResult

from miles_core.agent_server.agents import container_processes
from miles_core.agent_server.agents.job import AgentJob
from miles_core.agent_server.agents.outcome import was_ended
from miles_core.agent_server.containers import ContainerEnvironment
from miles_core.agent_server.protocol import Phase
from miles_core.agent_server.sandbox import processes
from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment
from miles_core.agent_server.sandbox.host import PIDS

CROWD = PIDS // 2
"""More processes than this are no work that an agent was asked for."""


async def enter(
    phase: Phase, job: AgentJob, environments: Sequence[BaseEnvironment], harbor: HarborResult
) -> None:
    """Begin a phase of a trial in bubblewrap sandboxes or containers; raises SandboxError."""
    if phase is Phase.AGENT:
        found = [await running(environment) for environment in environments]
        job.before = frozenset().union(*found) - job.own
    elif phase is Phase.VERIFIER:
        ended = was_ended(job, harbor)
        for environment in environments:
            await _end(environment, ended, job.before)


async def running(environment: BaseEnvironment) -> frozenset[processes.Member]:
    """The processes of an environment; none where they cannot be seen. Raises SandboxError."""
    if isinstance(environment, ContainerEnvironment):
        seen = environment.running
        return await container_processes.members(environment) if seen else frozenset()
    if not isinstance(environment, BubblewrapEnvironment) or not environment.running:
        return frozenset()
    return environment.box.members()


async def _end(
    environment: BaseEnvironment, ended: bool, before: frozenset[processes.Member]
) -> None:
    """End what an agent left, if it was ended or left a crowd; what it put where the verifier
    works goes in any case. A bubblewrap sandbox has `SandboxHost.enter` for that."""
    if isinstance(environment, ContainerEnvironment):
        if ended and environment.running:
            await container_processes.end_members(environment, before)
        if environment.running:
            await environment.clear_for_verifier()
        return
    pid = _first(environment)
    if pid is not None and (ended or len(await running(environment)) > CROWD):
        await asyncio.to_thread(processes.end_members, pid, before)


def _first(environment: BaseEnvironment) -> int | None:
    if not isinstance(environment, BubblewrapEnvironment) or not environment.running:
        return None
    return environment.box.pid
