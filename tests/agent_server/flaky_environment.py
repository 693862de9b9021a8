"""A sandbox that does not come up for some tasks, for `--sandbox flaky_environment:Flaky`."""

from __future__ import annotations

from typing import override

from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment
from miles_core.agent_server.sandbox.errors import SandboxError


class Flaky(BubblewrapEnvironment):
    @override
    async def start(self, force_build: bool) -> None:
        if self.environment_dir.parent.name.startswith("boot-"):
            raise SandboxError("no sandbox today")
        await super().start(force_build)
