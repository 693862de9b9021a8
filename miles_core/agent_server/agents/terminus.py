"""terminus-2: Harbor's agent on this host, which works in a tmux session of the sandbox."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any, override

from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from miles_core.agent_server.agents.job import JOBS, AgentFailed
from miles_core.agent_server.agents.leftovers import running
from miles_core.agent_server.agents.session_model import PolicyStopped, SessionModel
from miles_core.agent_server.agents.terminus_class import import_terminus
from miles_core.agent_server.agents.terminus_parser import AnyAnswerParser
from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment
from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.verdicts import Cause

if TYPE_CHECKING:
    from harbor.agents.terminus_2 import Terminus2
    from harbor.agents.terminus_2.terminus_2 import Command
    from harbor.agents.terminus_2.tmux_session import TmuxSession
    from harbor.llms.base import LLMResponse
    from harbor.llms.chat import Chat
else:
    Terminus2 = import_terminus()

TERMINUS = "terminus-2"
NO_PROCESS = os.strerror(errno.EAGAIN)
"""What fork(2) says where the limit of processes is reached."""
MALFORMED_LIMIT = 3
"""How many answers in a row may not be in the format; mini-swe-agent has the same limit."""


class Terminus(Terminus2):
    """Terminus2 with the limits of a trial; `JOBS[trial_id]` is its job.

    It keeps one conversation from the first to the last model call: nothing is summarised, and an
    answer that was cut off ends it. The tokens of a session are then one sequence.
    """

    MODEL_CONNECTION = None

    def __init__(self, *args: Any, trial_id: str, **kwargs: Any) -> None:
        self._job = JOBS[trial_id]
        self._malformed = 0
        self._is_new = True
        super().__init__(*args, enable_summarize=False, record_terminal_session=False, **kwargs)

    @override
    def _init_llm(self, *args: Any, **kwargs: Any) -> SessionModel:
        return SessionModel(self._job)

    @override
    def _get_parser(self) -> AnyAnswerParser:
        return AnyAnswerParser(super()._get_parser())

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Start the tmux session; raises AgentFailed where there is no tmux."""
        if isinstance(environment, BubblewrapEnvironment):
            found = await environment.exec("command -v tmux")
            if found.return_code != 0:
                raise self._job.fail(Cause.AGENT_SETUP_FAILED, _no_tmux())
        before = await running(environment)
        try:
            await super().setup(environment)
        except SandboxError:
            raise
        except RuntimeError as error:
            raise self._job.fail(Cause.AGENT_SETUP_FAILED, str(error)) from error
        self._job.own |= await running(environment) - before

    @override
    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Run the agent. Returns when the verifier may grade; raises AgentFailed otherwise."""
        assert self._session is not None
        self._malformed = 0
        if not self._is_new and not await self._session.is_session_alive():
            await self.setup(environment)  # an earlier step of the task ended it
        self._is_new = False
        try:
            with self._job.at_work():
                await super().run(instruction, environment, context)
        except PolicyStopped as stopped:
            self._job.cause = stopped.cause
        except AgentFailed as failure:
            self._job.failure = failure
            raise
        except SandboxError:
            raise
        except RuntimeError as error:
            exhausted = NO_PROCESS in str(error)  # its own commands are the sandbox's limit
            if not self._job.turns or (not exhausted and await self._session.is_session_alive()):
                raise self._job.fail(Cause.AGENT_CRASHED, str(error)) from error
            self._job.cause = Cause.AGENT_CRASHED  # its own keys brought it to this
        finally:
            await self._llm.end()

    @override
    async def _query_llm(
        self,
        chat: Chat,
        prompt: str,
        original_instruction: str = "",
        session: TmuxSession | None = None,
    ) -> LLMResponse:
        """One call, with no second attempt: that would be another branch of the session.

        The answer stays in the conversation as it came, so that the session knows it again.
        """
        response = await chat.chat(prompt)
        chat.messages[-1] = self._llm.message
        return response

    @override
    async def _handle_llm_interaction(
        self, *args: Any, **kwargs: Any
    ) -> tuple[list[Command], bool, str, str, str, LLMResponse]:
        interaction = await super()._handle_llm_interaction(*args, **kwargs)
        commands, _, feedback, *_ = interaction
        self._job.tool_calls = (self._job.tool_calls or 0) + len(commands)
        self._malformed = self._malformed + 1 if "ERROR:" in feedback else 0
        if self._malformed >= MALFORMED_LIMIT:
            raise PolicyStopped(Cause.MALFORMED_ACTIONS)
        return interaction


def _no_tmux() -> str:
    where = "on this host (Debian: apt-get install tmux)"
    if shutil.which("tmux"):
        where = "in the image of the task"
    return f"{TERMINUS} works in tmux, which the sandbox does not have: install it {where}"
