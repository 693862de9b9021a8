"""What the agents of this server's own have in common."""

from __future__ import annotations

from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment

from miles_core.agent_server.agents.job import JOBS


class OurAgent(BaseAgent):
    """An agent for which nothing is installed; `JOBS[trial_id]` is its job."""

    def __init__(self, *args: Any, trial_id: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._job = JOBS[trial_id]

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""
