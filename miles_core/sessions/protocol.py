"""What a session server answers; imported by its clients, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EndReason = Literal["token_budget", "turn_limit", "engine_failed", "session_failed"]


class SessionRequest(BaseModel):
    """Body of `POST /sessions`.

    `max_seq_len` counts the tokens of a whole conversation. `sampling_params` are pinned: the agent
    cannot change them; `max_tokens` among them is the most that one call may sample, of which an
    agent may ask for less. `session_id` is a name for logs. With `routed_experts` the engine is
    asked which experts each token went to, for training that replays the routing.
    """

    model_config = ConfigDict(extra="forbid")

    session_id: str | None = None
    max_seq_len: int = Field(ge=1, lt=2**31)
    max_turns: int | None = Field(None, ge=1, lt=2**31)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    routed_experts: bool = False

    @field_validator("sampling_params")
    @classmethod
    def _can_be_sent(cls, params: dict[str, Any]) -> dict[str, Any]:
        for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
            value = params.get(name, 1)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"{name} must be a whole number from 1 on")
        for name in ("temperature", "top_p"):
            value = params.get(name, 1.0)
            if type(value) not in (int, float) or not 0 <= value <= 100:
                raise ValueError(f"{name} must be a number from 0 to 100")
        try:
            orjson.dumps(params)
        except TypeError as error:
            raise ValueError(f"no engine can be sent this: {error}") from error
        return params


class SessionCreated(BaseModel):
    """Answer of `POST /sessions`; `session_id` is the secret."""

    session_id: str
    path: str
    session_server_instance_id: str


class VersionSpan(BaseModel):
    """`tokens[start:end]` of a sample were sampled by weights of this version."""

    version: int
    start: int
    end: int


class TurnSpan(BaseModel):
    """`tokens[start:end]` of a sample are what the engine sampled under `rid`.

    `weight_versions` divide the span when weights were pushed while it was sampled;
    `weight_version` is the oldest of them.
    """

    rid: str
    start: int
    end: int
    weight_version: int
    weight_versions: list[VersionSpan] = Field(default_factory=list)
    finish_reason: str


class Sample(BaseModel):
    """One token sequence. `loss_mask` is 1 on the tokens of its `turns`, and nowhere else.

    The three lists have one entry for each token; a log-probability is 0.0 where the mask is 0.
    `routed_experts` is, where the engine gave it, base64 of one row of bytes for each token but the
    last, as the engine wrote them (int32, layers x experts of a token).
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    turns: list[TurnSpan]
    routed_experts: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Sample:
        if not len(self.tokens) == len(self.loss_mask) == len(self.logprobs):
            raise ValueError("tokens, loss_mask and logprobs differ in length")
        at = 0
        for turn in self.turns:
            if not at <= turn.start < turn.end <= len(self.tokens):
                raise ValueError(f"turn {turn.rid} does not fit into its sample")
            if 1 in self.loss_mask[at : turn.start] or 0 in self.loss_mask[turn.start : turn.end]:
                raise ValueError(f"the mask disagrees with turn {turn.rid}")
            at = turn.end
        if 1 in self.loss_mask[at:]:
            raise ValueError("the mask goes on after the last turn")
        return self


class SessionSamples(BaseModel):
    """Answer of `GET /sessions/{id}/samples`.

    Every recorded turn is in exactly one sample's `turns`, apart from answers that a client
    never used and asked for again (`retries`). `model_calls` is their number. `tool_lists` counts
    the different tool lists that were sent, and `ignored_fields` names what requests asked for and
    no session can do.
    """

    session_id: str
    model_calls: int
    retries: int = 0
    tool_lists: int = 0
    ignored_fields: list[str] = Field(default_factory=list)
    end_reason: EndReason | None = None
    samples: list[Sample]


@dataclass(frozen=True)
class SessionHandle:
    """An open session. `base_url` is for the agent and holds the secret."""

    base_url: str
    server_url: str
    session_id: str
    instance_id: str
