"""What the server was started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.agent_server.environments import Sandbox
from miles_core.agent_server.reaper.owner import Owner

BUILD_LIMIT_S = 240.0
SETUP_LIMIT_S = 60.0
VERIFIER_LIMIT_S = 540.0
TEARDOWN_LIMIT_S = 60.0


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one agent server."""

    tasks_dir: Path
    trials_dir: Path
    agent_timeout_s: float = 5400.0
    max_concurrent: int = 32
    sandbox: Sandbox = field(default_factory=Sandbox.bubblewrap)
    agent_config: dict[str, Any] = field(default_factory=dict)
    owner: Owner = field(default_factory=lambda: Owner(""))
    """Whose the sandboxes are: that of the trials directory."""

    @property
    def trial_timeout_s(self) -> float:
        """The bound on a whole trial; it covers the bounds of all phases."""
        others = BUILD_LIMIT_S + SETUP_LIMIT_S + VERIFIER_LIMIT_S + TEARDOWN_LIMIT_S
        return self.agent_timeout_s + others
