"""One model call at an engine that has SGLang's routes."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import httpx


class EngineFailure(Exception):
    """The engine gave no usable answer. `status` is what the agent's call answers: 502 or 503."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class ContextRefused(Exception):
    """The engine itself says that the prompt does not fit into its context."""


@dataclass(frozen=True)
class Generation:
    """What was sampled: ids, the log-probability of each, and under which weights."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    finish_reason: str


class EngineCaller:
    """Calls engines; a session stays with one of them, where its prefix is cached."""

    def __init__(self, urls: list[str], timeout_s: float) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    def url_for(self, session_id: str) -> str:
        digest = hashlib.sha256(session_id.encode()).digest()
        return self._urls[int.from_bytes(digest[:8], "big") % len(self._urls)]

    async def generate(
        self, session_id: str, rid: str, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> Generation:
        """Sample a continuation of `input_ids`; raises `EngineFailure`, `ContextRefused`."""
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
            "stream": False,
        }
        # The key only has to be equal for equal sessions: the secret stays here.
        key = hashlib.sha256(session_id.encode()).hexdigest()[:32]
        url = self.url_for(session_id)
        try:
            response = await self._http.post(
                f"{url}/generate", json=body, headers={"X-SMG-Routing-Key": key}
            )
        except httpx.TimeoutException as error:
            await self.abort(session_id, rid)
            raise EngineFailure(
                f"engine {url} did not answer in {self._timeout_s:g} s ({type(error).__name__})",
                503,
            ) from error
        except httpx.HTTPError as error:
            raise EngineFailure(f"engine {url} cannot be reached: {error!r}") from error
        if response.status_code != 200:
            text = response.text[:500]
            if response.status_code == 400 and "context length" in text:
                raise ContextRefused(text)
            status = 503 if response.status_code in (429, 503) else 502
            raise EngineFailure(f"engine {url} answered {response.status_code}: {text}", status)
        try:
            answer = response.json()
        except ValueError as error:
            raise EngineFailure(f"engine {url} answered no JSON") from error
        return read_generation(answer, sampling_params["max_new_tokens"])

    async def abort(self, session_id: str, rid: str) -> None:
        """Ask the engine to stop `rid`; one that cannot be reached is not waited for."""
        try:
            await self._http.post(
                f"{self.url_for(session_id)}/abort_request", json={"rid": rid}, timeout=5.0
            )
        except httpx.HTTPError:
            return

    async def aclose(self) -> None:
        await self._http.aclose()


def read_generation(answer: Any, max_new_tokens: int) -> Generation:
    """Check an answer of `/generate`; anything that is not exact is an `EngineFailure`."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineFailure("the engine's answer has no meta_info")
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind == "abort":
        message = reason.get("message") if isinstance(reason, dict) else ""
        raise EngineFailure(f"the generation was aborted: {message}", 503)
    if kind not in ("stop", "length"):
        raise EngineFailure(f"the engine ended with an unknown finish_reason {reason!r}")
    try:
        pairs = [(int(entry[1]), float(entry[0])) for entry in meta["output_token_logprobs"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineFailure("the engine's answer has no output_token_logprobs") from error
    if not pairs or len(pairs) > max_new_tokens:
        raise EngineFailure(f"the engine sampled {len(pairs)} tokens of at most {max_new_tokens}")
    ids = tuple(token for token, _ in pairs)
    given = answer.get("output_ids")
    if given is not None and tuple(given) != ids:
        raise EngineFailure("output_ids and output_token_logprobs disagree")
    logprobs = tuple(value for _, value in pairs)
    if not all(math.isfinite(value) and value <= 1e-3 for value in logprobs):
        raise EngineFailure("the engine's log-probabilities are not finite or positive")
    return Generation(ids, logprobs, _version(meta.get("weight_version")), kind)


def _version(value: Any) -> int:
    """The integer version; an SGLang engine whose weights were never pushed says `default`."""
    if value == "default":
        return 0
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise EngineFailure(f"weight_version is {value!r}, not an integer") from error
