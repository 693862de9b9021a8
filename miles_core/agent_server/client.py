"""The client of the agent server.

`AgentServerClient.run` takes one trial from start to verdict. It rides over restarts and short
outages of the server, and it never makes a reward up: what the server did not send is no verdict.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import ValidationError

from miles_core.agent_server.protocol import (
    MOST_SECONDS,
    Health,
    TrialRequest,
    TrialResult,
    TrialState,
    TrialStatus,
)
from miles_core.verdicts import Cause, Verdict

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
QUEUE_FULL_RETRY_S = 5.0


class AgentServerError(RuntimeError):
    """The agent server refused a request; `status` is the HTTP status and `code` its reason."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"agent server answered {status} ({code}): {message}")
        self.status = status
        self.code = code


class AgentServerUnreachable(ConnectionError):
    """The agent server could not be reached, or its answer was no answer of an agent server."""


class AgentServerClient:
    """Calls one agent server at `url`; `token` is its bearer token.

    `outage_s` bounds how long `run` keeps trying while the server does not answer. Every method
    but `run` raises `AgentServerUnreachable` or `AgentServerError`.
    """

    def __init__(self, url: str, token: str | None = None, outage_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self.outage_s = outage_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(30.0, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> Health:
        """State and settings of the server."""
        return Health.model_validate(await self._call("GET", "/health"))

    async def tasks(self) -> list[str]:
        """The ids of all tasks that the server has."""
        return list((await self._call("GET", "/tasks"))["tasks"])

    async def start(self, trial_id: str, request: TrialRequest) -> TrialStatus:
        """Start a trial, or join the one that has this id already."""
        body = request.model_dump(mode="json", exclude_none=True)
        return self._status(await self._call("PUT", f"/trials/{trial_id}", json=body))

    async def wait(self, trial_id: str, wait_s: float = 30.0) -> TrialStatus:
        """The trial's status, after at most `wait_s` seconds or when it has ended."""
        answer = await self._call(
            "GET", f"/trials/{trial_id}", params={"wait": wait_s}, timeout=wait_s + 30.0
        )
        return self._status(answer)

    async def cancel(self, trial_id: str) -> TrialStatus:
        """End a trial and free its sandbox."""
        return self._status(await self._call("DELETE", f"/trials/{trial_id}", timeout=60.0))

    async def flush(self, instance_id: str) -> list[str]:
        """End every trial of one trainer; the ids that were ended."""
        answer = await self._call(
            "POST", "/flush", json={"session_server_instance_id": instance_id}, timeout=120.0
        )
        return list(answer["ended"])

    async def run(self, trial_id: str, request: TrialRequest, timeout_s: float) -> TrialResult:
        """Run one trial to its end, within `timeout_s` seconds.

        An outage of the server is waited out for `outage_s` seconds. A trial that a restarted
        server does not know is started again under the same id. When time is up the trial is
        cancelled; when this call is cancelled, so is the trial.
        """
        deadline = time.monotonic() + timeout_s
        try:
            return await self._run(trial_id, request, deadline)
        except AgentServerError as error:
            return _no_verdict(trial_id, Cause.AGENT_SERVER_UNREACHABLE, str(error))
        except AgentServerUnreachable as error:
            cause = Cause.AGENT_SERVER_UNREACHABLE
            return _no_verdict(trial_id, cause, f"{self.url} for {self.outage_s:.0f} s: {error}")
        except TimeoutError:
            await self._cancel_quietly(trial_id)
            detail = f"no verdict after {timeout_s:.0f} s; the trial was cancelled"
            return _no_verdict(trial_id, Cause.TRIAL_TIMEOUT, detail)
        except asyncio.CancelledError:
            await self._cancel_quietly(trial_id)
            raise

    async def _run(self, trial_id: str, request: TrialRequest, deadline: float) -> TrialResult:
        """The loop of `run`; raises TimeoutError when the deadline passes."""
        known = False
        failing_since: float | None = None
        pause = FIRST_RETRY_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                if known:
                    status = await self.wait(trial_id, min(30.0, left, request.lease_s / 2))
                else:
                    asked = request.model_copy(update={"deadline_s": min(left, MOST_SECONDS)})
                    status = await self.start(trial_id, asked)
            except AgentServerUnreachable:
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since > self.outage_s:
                    raise
                await asyncio.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(2 * pause, LONGEST_RETRY_S)
                continue
            except AgentServerError as error:
                full = error.code == "queue_full"  # it may have room when other trials have ended
                if not full and not (known and error.status == 404):
                    raise
                known = False
                await asyncio.sleep(min(left, QUEUE_FULL_RETRY_S if full else FIRST_RETRY_S))
                continue
            known, failing_since, pause = True, None, FIRST_RETRY_S
            if status.state is TrialState.ENDED:
                if status.result is None:
                    raise AgentServerUnreachable("a trial that ended came without a result")
                return status.result
        raise TimeoutError

    async def _cancel_quietly(self, trial_id: str) -> None:
        """Cancel a trial, best effort: its lease ends it when the server cannot be told."""
        try:
            async with asyncio.timeout(10.0):
                await asyncio.shield(self.cancel(trial_id))
        except (AgentServerError, AgentServerUnreachable, TimeoutError):
            return

    def _status(self, answer: Any) -> TrialStatus:
        try:
            return TrialStatus.model_validate(answer)
        except ValidationError as error:
            raise AgentServerUnreachable(f"not a trial's status: {error}") from error

    async def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = await self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise AgentServerUnreachable(f"{type(error).__name__}: {error}") from error
        try:
            answer = response.json()
        except ValueError as error:
            raise AgentServerUnreachable(
                f"{method} {path}: status {response.status_code} without JSON"
            ) from error
        if response.is_success:
            return answer
        problem = answer.get("error") if isinstance(answer, dict) else None
        problem = problem if isinstance(problem, dict) else {}
        message = str(problem.get("message") or response.text[:200])
        if response.status_code >= 500:
            raise AgentServerUnreachable(f"status {response.status_code}: {message}")
        raise AgentServerError(response.status_code, str(problem.get("code", "error")), message)


def _no_verdict(trial_id: str, cause: Cause, detail: str) -> TrialResult:
    return TrialResult.of(trial_id, Verdict.no_verdict(cause, detail[:500]))
