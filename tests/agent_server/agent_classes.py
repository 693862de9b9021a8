"""Agents of somebody's own, for tests: subclasses of Harbor's BaseAgent, named by import path."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class Plain(BaseAgent):
    """Asks the model once for a shell command, runs it and reports its tokens."""

    @staticmethod
    def name() -> str:
        return "plain"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        body: dict[str, Any] = {"model": self.model_name, "messages": []}
        body["messages"].append({"role": "user", "content": instruction})
        async with httpx.AsyncClient(base_url=self.extra_env["OPENAI_BASE_URL"]) as client:
            answer = (await client.post("/chat/completions", json=body)).json()
        await environment.exec(answer["choices"][0]["message"]["content"])
        context.n_input_tokens = answer["usage"]["prompt_tokens"]
        context.n_output_tokens = answer["usage"]["completion_tokens"]


class FailsToSetUp(Plain):
    async def setup(self, environment: BaseEnvironment) -> None:
        raise NonZeroAgentExitCodeError("no such package: gold")


class Crashes(Plain):
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        raise ZeroDivisionError("by zero")


class Stopped(NonZeroAgentExitCodeError):
    """An end of its own choice, after which the verifier runs."""


class Stops(Plain):
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        await super().run(instruction, environment, context)
        raise Stopped("enough")


class NotBuilt(Plain):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("it wants a colour")


class NoAgent:
    """Not an agent."""


class SlowToSetUp(Plain):
    """Its set-up takes until the file of that name is there, in the folder of its logs."""

    async def setup(self, environment: BaseEnvironment) -> None:
        while not (self.logs_dir / "go").exists():  # noqa: ASYNC110 (it waits for a test)
            await asyncio.sleep(0.02)


class TellsItsAddress(Plain):
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        raise ConnectionError(f"no answer of {self.extra_env['OPENAI_BASE_URL']}")
