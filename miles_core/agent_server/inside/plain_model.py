"""A model class for mini-swe-agent over the standard library: no litellm, no second of imports."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from endpoint import (
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
from minisweagent.exceptions import FormatError, LimitsExceeded
from minisweagent.models.utils.actions_toolcall import (
    BASH_TOOL,
    format_toolcall_observation_messages,
    parse_toolcall_actions,
)
from pydantic import BaseModel

SHOWN_LENGTH = 20_000
"""Characters of one text of a message that are told while the agent runs."""

WAITING_S = 0.5
"""How often an agent tells that it waits for the model: one that was stopped does not."""

USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
"""Errors of a machine that has no socket for one more connection."""


class ModelEndpointError(RuntimeError):
    """The endpoint gave no answer; `cause` is the name of a verdict's cause."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class PlainModelConfig(BaseModel):
    """Settings, with the names that mini-swe-agent's own model classes use."""

    model_name: str
    model_kwargs: dict[str, Any] = {}
    format_error_template: str = "{{ error }}"
    observation_template: str = (
        "<returncode>{{output.returncode}}</returncode>\n<output>\n{{output.output}}</output>"
    )
    timeout: float = TIMEOUT_S
    attempts: int = ATTEMPTS


class PlainModel:
    """OpenAI chat completions with the tool `bash`.

    `report` is given an event for each message of the conversation, when it is new, for each call
    when it begins and while it is open, and for each answer. A full context or a reached turn
    limit ends the agent cleanly, as its own limits do; an endpoint that fails, or whose answer is
    no chat completion, raises `ModelEndpointError`.
    """

    def __init__(self, base_url: str, report: Callable[[dict[str, Any]], None], **config: Any):
        self.config = PlainModelConfig(**config)
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._report = report
        self.limit: str | None = None
        self._told = 0
        """Messages of the conversation that were reported."""

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        """One model call; the answer as a message, with its actions under `extra`."""
        self._tell(messages[self._told :])
        plain = [{k: v for k, v in message.items() if k != "extra"} for message in messages]
        body = {
            "model": self.config.model_name.split("/", 1)[-1],
            "messages": plain,
            "tools": [BASH_TOOL],
            **self.config.model_kwargs,
            **kwargs,
        }
        try:
            with _waiting(self._report):
                answer = self._post(json.dumps(body).encode())
            response, choice, message = completion(answer)
        except NoCompletion as error:
            raise ModelEndpointError(error.cause, str(error)) from error
        turn = {"event": "turn", "usage": response.get("usage") or {}}
        extra = {"response": response, "cost": 0.0, "timestamp": time.time()}
        self._tell([{**message, "extra": extra}])
        try:
            actions = self._actions(choice, message)
        except FormatError as error:
            self._report({**turn, "tool_calls": 0})
            error.messages[0]["extra"].update(extra)
            error.messages = ({**message, "extra": {**extra, "actions": []}}, *error.messages)
            raise
        self._report({**turn, "tool_calls": len(actions)})
        return {**message, "extra": {**extra, "actions": actions}}

    def _tell(self, messages: list[dict[str, Any]]) -> None:
        """Report messages that are new."""
        for message in messages:
            self._report({"event": "message", "n": self._told, "message": shown(message)})
            self._told += 1

    def _actions(self, choice: dict[str, Any], message: dict[str, Any]) -> list[dict[str, Any]]:
        """The actions of an answer; FormatError without one. An answer cut off has none."""
        cut = choice.get("finish_reason") == "length"
        calls = [
            SimpleNamespace(
                id=call.get("id"),
                function=SimpleNamespace(
                    name=(call.get("function") or {}).get("name"),
                    arguments=(call.get("function") or {}).get("arguments"),
                ),
            )
            for call in ([] if cut else message.get("tool_calls") or [])
        ]
        return parse_toolcall_actions(
            calls,
            format_error_template=self.config.format_error_template,
            template_kwargs={"finish_reason": choice.get("finish_reason")},
        )

    def _post(self, body: bytes) -> bytes:
        """POST with a bounded number of attempts; only what was surely not answered is retried."""
        last, key = "", uuid.uuid4().hex
        for attempt in range(self.config.attempts):
            time.sleep(pause_s(attempt))
            try:
                status, answer = self._ask(body, key)
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if getattr(reason, "errno", None) in USED_UP:
                    raise  # no word about the endpoint
                last = f"{type(error).__name__}: {error}"
                continue
            if status is None:
                return answer
            last = self._refused(status, answer.decode(errors="replace"))
        raise ModelEndpointError("session_failed", f"{self.config.attempts} attempts: {last}")

    def _ask(self, body: bytes, key: str) -> tuple[int | None, bytes]:
        """One attempt: the answer, or an error status and the beginning of what came with it.

        By `key` a session knows a call that comes again, whose answer was lost on its way.
        """
        headers = {"content-type": "application/json", "authorization": "Bearer none"}
        headers["idempotency-key"] = key
        request = urllib.request.Request(self._url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout) as response:
                return None, _whole(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(4000)

    def _refused(self, status: int, text: str) -> str:
        """What an error status means: returns for another attempt, raises for the end."""
        cause, said = refusal(status, text)
        if cause in POLICY_LIMITS.values():
            self.limit = cause
            raise LimitsExceeded(
                {
                    "role": "exit",
                    "content": said,
                    "extra": {"exit_status": "LimitsExceeded", "submission": ""},
                }
            )
        if cause is not None:
            raise ModelEndpointError(cause, said)
        return said

    def format_message(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def format_observation_messages(
        self,
        message: dict[str, Any],
        outputs: list[dict[str, Any]],
        template_vars: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        return format_toolcall_observation_messages(
            actions=message.get("extra", {}).get("actions", []),
            outputs=outputs,
            observation_template=self.config.observation_template,
            template_vars=template_vars,
        )

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return self.config.model_dump()

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        settings = self.config.model_dump(mode="json")
        return {"info": {"config": {"model": settings, "model_type": kind}}}


@contextlib.contextmanager
def _waiting(report: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Tell that a call begins, and then again and again that this process still waits for it."""
    report({"event": "call"})
    before = signal.signal(signal.SIGALRM, lambda *_: report({"event": "waiting"}))
    signal.setitimer(signal.ITIMER_REAL, WAITING_S, WAITING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _whole(response: http.client.HTTPResponse) -> bytes:
    """The body of an answer; raises HTTPException for a part, NoCompletion for one too long."""
    length = response.length
    if length is not None and length <= ANSWER_LIMIT:
        return response.read()
    body = b"" if length is not None else response.read(ANSWER_LIMIT + 1)
    if length is not None or len(body) > ANSWER_LIMIT:
        raise NoCompletion(TOO_LONG)
    return body


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """What is told of a message: its texts, each of bounded length, its calls, time and usage."""
    extra = message.get("extra") or {}
    response = extra.get("response") or {}
    made = {
        key: _short(message[key])
        for key in ("role", "content", "reasoning_content", "tool_call_id")
        if message.get(key)
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [_call(call) for call in calls[:20] if isinstance(call, dict)]
    choices = [
        {"finish_reason": choice.get("finish_reason")}
        for choice in (response.get("choices") or [])[:1]
    ]
    response = {"usage": response.get("usage"), "choices": choices}
    return {**made, "extra": {"timestamp": extra.get("timestamp"), "response": response}}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    given = {key: _short(function.get(key)) for key in ("name", "arguments")}
    return {"id": _short(call.get("id")), "function": given}


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= SHOWN_LENGTH:
        return value
    half = SHOWN_LENGTH // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
