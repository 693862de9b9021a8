"""The agent `probe`: what could an agent of this task see, and does a reward that it forges last?

It works as the agent's user with nothing but commands, so that it sees what an agent would see,
in any kind of sandbox. It looks for the tests and the solution, and then leaves rewards of the
value `FORGED_REWARD` wherever a verifier might pick one up. Its findings are the trial's
`agent_metrics.probe`; that a forged reward lasted shows in the trial's reward.
"""

from __future__ import annotations

import shlex
from typing import Any, override

from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from miles_core.agent_server.agents.ours import OurAgent
from miles_core.agent_server.probe_scripts import FORGE, GIT, LOOK
from miles_core.agent_server.probe_secrets import Secret, in_patches, secrets_of, targets_of
from miles_core.agent_server.protocol import FORGED_REWARD, PROBE
from miles_core.agent_server.task_keys import ignored_keys

COMMAND_LIMIT_S = 30
"""Seconds of one script."""

FILE_LIMIT = 2 << 20
"""Bytes of one file of the sandbox that are compared."""

CANDIDATES = 20
"""Files with a telling line that are compared in full."""

REPOSITORIES = 5


class ProbeAgent(OurAgent):
    """Harbor agent; `AgentContext.metadata["probe"]` has the findings.

    They are `{"findings": [str], "notes": [str], "forged": int}`: what is visible that must not
    be, what may be worth a look, and how many files with a forged reward were left. A request may
    have `forge`, the way to do that (see `probe_scripts.FORGE`; default `files`), and `look`
    (false: only forge).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extra = self._job.request.model_extra or {}
        self._forge = str(extra.get("forge", "files"))
        self._look = bool(extra.get("look", True))

    capabilities = AgentCapabilities(skills=True, mcp_servers=True, mcp_http_headers=True)
    """It needs none of them, and a task that has some is looked at as any other."""

    @staticmethod
    @override
    def name() -> str:
        return PROBE

    @override
    def version(self) -> str:
        return "1"

    @override
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Look around, in the first step of a task only: later ones may keep earlier tests."""
        task_dir = environment.environment_dir.parent
        found = Looking(environment, secrets_of(task_dir))
        if self._look:
            found.notes += ignored_keys(task_dir / "task.toml")
            await found.look()
            self._look = False
        words = [self._forge, repr(FORGED_REWARD), *targets_of(task_dir)]
        forged = (await _command(environment, FORGE, words)).strip()
        context.metadata = {
            PROBE: {
                "findings": found.findings,
                "notes": found.notes,
                "forged": int(forged) if forged.isdigit() else 0,
            }
        }


class Looking:
    """One look around a sandbox for what an agent must not see."""

    def __init__(self, environment: BaseEnvironment, secrets: list[Secret]) -> None:
        self._environment = environment
        self._secrets = secrets
        self.findings: list[str] = []
        self.notes: list[str] = []

    async def look(self) -> None:
        """Search folders, files and git histories."""
        words = [word for secret in self._secrets for word in ("-e", secret.telling)]
        seen = await _command(self._environment, LOOK, words or ["-f", "/dev/null"])
        files, repositories = [], []
        for line in seen.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "readable":
                self.findings.append(f"the agent can read {rest}")
            elif kind == "git":
                repositories.append(rest)
            elif line.startswith("/"):
                files.append(line)
        for place in files[:CANDIDATES]:
            await self._compare(place)
        if repositories:
            await self._read_histories(repositories[:REPOSITORIES])

    async def _compare(self, place: str) -> None:
        """Does a file hold every line of a secret one?"""
        text = await _command(self._environment, f'head -c {FILE_LIMIT} -- "$1"', [place])
        for secret in self._secrets:
            if secret.is_in(text):
                line = f"the content of {secret.path} is in {place}"
                (self.findings if secret.strict else self.notes).append(line)

    async def _read_histories(self, repositories: list[str]) -> None:
        """Look for the solution in commits that the checked-out one does not come from."""
        history = await _command(self._environment, GIT, repositories)
        for secret in self._secrets:
            if secret.is_solution and in_patches(secret, history):
                self.findings.append(
                    f"the content of {secret.path} is in a git commit beyond the checked-out one"
                )


async def _command(environment: BaseEnvironment, script: str, words: list[str]) -> str:
    """The output of a shell script that is given `words`, as the agent's user."""
    line = shlex.join(["sh", "-c", script, PROBE, *words])
    done = await environment.exec(line, timeout_sec=COMMAND_LIMIT_S)
    return done.stdout or ""
