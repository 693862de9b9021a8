"""The model of an agent that runs on this host: OpenAI chat completions over HTTP.

What a session answers means the same here as for an agent inside a sandbox: a full context and
a reached turn limit stop the agent by its own doing, a failed engine or session gives no verdict.
"""

from __future__ import annotations

import asyncio
from typing import Any, override

import httpx
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.metric import UsageInfo

from miles_core.agent_server.agents.job import AgentFailed, AgentJob
from miles_core.agent_server.inside.endpoint import (
    ATTEMPTS,
    POLICY_LIMITS,
    TIMEOUT_S,
    pause_s,
    refusal,
)
from miles_core.verdicts import Cause

CONNECT_S = 30.0


class PolicyStopped(Exception):
    """The agent is at a limit of its own; what it has done so far is graded."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


class SessionModel(BaseLLM):
    """The model of one trial.

    Every call carries the sampling parameters of the request. The turn limit and the token budget
    of the request hold whether or not the endpoint knows of them. An answer that was cut off
    (`finish_reason` is `length`) is counted and never given to the agent.
    """

    def __init__(self, job: AgentJob) -> None:
        super().__init__()
        self._job = job
        self._client: httpx.AsyncClient | None = None
        self._used = 0
        """Tokens of the conversation up to the last answer, as the endpoint counts them."""
        self.message: dict[str, Any] = {}
        """The last answer, as it came."""

    @override
    async def call(
        self, prompt: str, message_history: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> LLMResponse:
        """One model call; raises PolicyStopped at a limit and AgentFailed without an answer."""
        request = self._job.request
        if request.max_turns is not None and (self._job.turns or 0) >= request.max_turns:
            raise PolicyStopped(Cause.TURN_LIMIT)
        if request.max_seq_len is not None and self._used >= request.max_seq_len:
            raise PolicyStopped(Cause.TOKEN_BUDGET)
        response = await self._post(
            {
                "model": request.model.split("/", 1)[-1],
                "messages": [*(message_history or []), {"role": "user", "content": prompt}],
                **request.sampling_params,
            }
        )
        try:
            choice = response["choices"][0]
            self.message = {"role": "assistant", **choice["message"]}
            content = str(self.message.get("content") or "")
        except (KeyError, IndexError, TypeError) as error:
            raise AgentFailed(Cause.SESSION_FAILED, f"not a completion: {error!r}") from error
        usage = response.get("usage") or {}
        self._job.answered(usage)
        sizes = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        self._used = sum(sizes)
        cut = choice.get("finish_reason") == "length"
        if cut or (request.max_seq_len is not None and self._used > request.max_seq_len):
            raise PolicyStopped(Cause.TOKEN_BUDGET)
        return LLMResponse(
            content=content,
            reasoning_content=self.message.get("reasoning_content"),
            model_name=response.get("model"),
            usage=UsageInfo(
                prompt_tokens=sizes[0], completion_tokens=sizes[1], cache_tokens=0, cost_usd=0.0
            ),
        )

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST with a bounded number of attempts; only what has no answer is tried again."""
        url = str(self._job.request.base_url).rstrip("/") + "/chat/completions"
        if self._client is None:
            headers = {"authorization": "Bearer none"}
            timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
            self._client = httpx.AsyncClient(timeout=timeout, headers=headers, trust_env=False)
        last = ""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(pause_s(attempt))
            try:
                answer = await self._client.post(url, json=body)
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
                continue
            if answer.is_success:
                try:
                    return dict(answer.json())
                except (ValueError, TypeError) as error:
                    raise AgentFailed(Cause.SESSION_FAILED, f"not JSON: {error}") from error
            cause, last = refusal(answer.status_code, answer.text[:4000])
            if cause is None:
                continue
            if cause in POLICY_LIMITS.values():
                raise PolicyStopped(Cause(cause))
            raise AgentFailed(Cause(cause), last)
        raise AgentFailed(Cause.SESSION_FAILED, f"{ATTEMPTS} attempts: {last}")

    async def end(self) -> None:
        """End a conversation: close the connection. Another one may begin after it."""
        self._used = 0
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    @override
    def get_model_context_limit(self) -> int:
        """The request's token budget; without one there is no limit that is known here."""
        return self._job.request.max_seq_len or 2**31

    @override
    def get_model_output_limit(self) -> int | None:
        value = self._job.request.sampling_params.get("max_tokens")
        return int(value) if value is not None else None
