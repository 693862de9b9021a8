"""The model of an agent that runs on this host: OpenAI chat completions over HTTP.

What a session answers means the same here as for an agent inside a sandbox: a full context and
a reached turn limit stop the agent by its own doing, a failed engine or session gives no verdict.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, override

import httpx
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.metric import UsageInfo

from miles_core.agent_server.agents.job import AgentFailed, AgentJob
from miles_core.agent_server.inside.endpoint import (
    ANSWER_LIMIT,
    ATTEMPTS,
    POLICY_LIMITS,
    TIMEOUT_S,
    TOO_LONG,
    NoCompletion,
    completion,
    pause_s,
    refusal,
)
from miles_core.verdicts import Cause

CONNECT_S = 30.0
HEADERS = {
    "authorization": "Bearer none",
    "content-type": "application/json",
    "accept-encoding": "identity",
}


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
        body = {
            "model": request.model.split("/", 1)[-1],
            "messages": [*(message_history or []), {"role": "user", "content": prompt}],
            **request.sampling_params,
        }
        self._job.call_begins()
        try:
            response, choice, self.message = completion(await self._post(json.dumps(body)))
        except NoCompletion as error:
            raise AgentFailed(Cause(error.cause), str(error)) from error
        self._job.call_ends()
        usage = response.get("usage") or {}
        self._job.answered(usage)
        sizes = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        self._used = sum(sizes)
        cut = choice.get("finish_reason") == "length"
        if cut or (request.max_seq_len is not None and self._used > request.max_seq_len):
            raise PolicyStopped(Cause.TOKEN_BUDGET)
        return LLMResponse(
            content=self.message.get("content") or "",
            reasoning_content=self.message.get("reasoning_content"),
            model_name=response.get("model"),
            usage=UsageInfo(
                prompt_tokens=sizes[0], completion_tokens=sizes[1], cache_tokens=0, cost_usd=0.0
            ),
        )

    async def _post(self, body: str) -> bytes:
        """POST with a bounded number of attempts; only what has no answer is tried again."""
        last, key = "", uuid.uuid4().hex
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(pause_s(attempt))
            try:
                status, answer = await self._ask(body, key)
            except httpx.HTTPError as error:
                last = f"{type(error).__name__}: {error}"
                continue
            if 200 <= status < 300:
                return answer
            cause, last = refusal(status, answer[:4000].decode(errors="replace"))
            if cause is None:
                continue
            if cause in POLICY_LIMITS.values():
                raise PolicyStopped(Cause(cause))
            raise AgentFailed(Cause(cause), last)
        raise AgentFailed(Cause.SESSION_FAILED, f"{ATTEMPTS} attempts: {last}")

    async def _ask(self, body: str, key: str) -> tuple[int, bytes]:
        """One attempt: status and body as they came; raises NoCompletion for one too long.

        By `key` a session knows a call that comes again, whose answer was lost on its way.
        """
        url = str(self._job.request.base_url).rstrip("/") + "/chat/completions"
        if self._client is None:
            timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
            self._client = httpx.AsyncClient(timeout=timeout, headers=HEADERS, trust_env=False)
        whole = bytearray()
        headers = {"idempotency-key": key}
        async with self._client.stream("POST", url, content=body, headers=headers) as answer:
            async for part in answer.aiter_raw():
                whole += part
                if len(whole) > ANSWER_LIMIT:
                    raise NoCompletion(TOO_LONG)
        return answer.status_code, bytes(whole)

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
