"""What the agent server and its clients say to each other.

This module needs pydantic alone, so that a client runs where neither Harbor nor FastAPI is.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from miles_core.verdicts import Cause, Verdict, VerdictKind

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Form of a task id and of a trial id; both name a directory."""

_ID = re.compile(ID_PATTERN)
MAX_ID_LENGTH = 200

PROBE = "probe"
"""The agent that looks what an agent could see, and forges rewards; for checks of tasks."""

FORGED_REWARD = 1.625
"""The value of every reward that `probe` forges: above all usual ones, so that nothing that is
done about low rewards hides it, and exact in binary."""


def valid_id(value: str) -> bool:
    """Whether `value` may name a task or a trial: one path component that is not hidden."""
    return len(value) <= MAX_ID_LENGTH and _ID.fullmatch(value) is not None


def id_problem(value: str) -> str:
    """Why `value`, which is no valid id, is none."""
    if not value:
        return "it is empty"
    if len(value) > MAX_ID_LENGTH:
        return f"it has {len(value)} characters, and an id has at most {MAX_ID_LENGTH}"
    odd = next((letter for letter in value if not _ID.fullmatch(f"a{letter}")), None)
    if odd is not None:
        return f"it has {odd!a}, and an id has letters of ASCII, digits, '.', '_' and '-' alone"
    return f"it begins with {value[0]!a}, and an id begins with a letter or a digit"


MOST_SECONDS = 10_000_000.0
"""Of every time that a request names."""
MOST_COUNT = 2**31 - 1
PARAMS_LIMIT = 64 << 10
"""Bytes of the sampling parameters as JSON."""
RESERVED_PARAMS = ("messages", "model", "stream", "tools", "api_key", "api_base", "base_url")
"""What the agent itself says in a model call; and no secret, since these are kept and shown."""

_NUMBERS = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "max_tokens": (1, MOST_COUNT)}
"""Sampling parameters whose bounds are known."""


def _checked_url(value: str) -> str:
    """An address that can be called, or ValueError; its text is in no error, as it is a secret."""
    try:
        url = urlsplit(value)
        whole = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of its port or the brackets of its host
        whole = False
    if not whole:
        raise ValueError("it must be http://HOST:PORT/...")
    if not value.isascii() or any(ord(letter) <= 32 or ord(letter) == 127 for letter in value):
        raise ValueError("it has a space or a character that no URL has")
    return value


def _checked_params(value: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters that can be sent as JSON, or ValueError."""
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (ValueError, RecursionError) as error:
        raise ValueError("they must be JSON of finite numbers and Unicode text") from error
    if size > PARAMS_LIMIT:
        raise ValueError(f"they have more than {PARAMS_LIMIT} bytes")
    _check_depth(value, 8)
    for name in RESERVED_PARAMS:
        if name in value:
            raise ValueError(f"{name} is no sampling parameter")
    for name, (least, most) in _NUMBERS.items():
        given = value.get(name)
        if given is None:
            continue
        if type(given) not in (int, float) or not least <= given <= most:
            raise ValueError(f"{name} must be a number from {least} to {most}")
    return value


def _check_depth(value: Any, depth: int) -> None:
    """Raise ValueError for what is nested deeper than `depth`, or has numbers beyond 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("they have a number beyond 64 bits")
    if isinstance(value, (dict, list)):
        if depth == 0:
            raise ValueError("they are nested too deep")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth - 1)


Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Name = Annotated[str, Field(max_length=1000)]
Url = Annotated[str, Field(max_length=4000), AfterValidator(_checked_url)]
Params = Annotated[dict[str, Any], AfterValidator(_checked_params)]


class TrialRequest(BaseModel):
    """One trial: which task, which agent, and the model endpoint that the agent calls.

    Keys that are not listed are kept as metadata (`model_extra`).
    """

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    instance_id: Name = Field(description="Names a directory under the tasks directory")
    agent_name: Name = "mini-swe-agent"
    base_url: Url | None = Field(None, description="OpenAI-compatible URL of the session")
    model: Name = Field("openai/policy", min_length=1)
    sampling_params: Params = Field(default_factory=dict)
    max_seq_len: Count | None = None
    max_turns: Count | None = None
    lease_s: Seconds = Field(
        120.0, description="Seconds without a request for it after which a trial is ended"
    )
    deadline_s: Seconds | None = Field(
        None,
        description="Seconds after which the caller gives up: a trial that would wait longer in "
        "the queue is refused (429)",
    )
    session_server_id: Name | None = None
    session_server_instance_id: Name | None = None
    trial_id: Name | None = Field(None, description="Used by POST /run; default: a new one")


class TrialState(StrEnum):
    """Where a trial stands in the queue."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Phase(StrEnum):
    """What a trial is doing."""

    QUEUED = "queued"
    ENVIRONMENT = "environment"
    AGENT_SETUP = "agent_setup"
    AGENT = "agent"
    VERIFIER = "verifier"
    TEARDOWN = "teardown"
    ENDED = "ended"


class AgentMetrics(BaseModel):
    """Counts and seconds of one trial; a phase that did not run has no time.

    `turns` counts answered model calls, `tool_calls` the commands that the model asked for. A
    count is None for an agent that calls no model, and where it is not known.
    """

    turns: int | None = None
    tool_calls: int | None = None
    n_input_tokens: int | None = None
    n_output_tokens: int | None = None
    env_setup_time: float | None = None
    agent_setup_time: float | None = None
    agent_run_time: float | None = None
    eval_time: float | None = None
    total_time: float | None = None
    disk_bytes: int | None = Field(None, description="In the sandbox's writable layers at the end")
    memory_peak_bytes: int | None = None
    probe: dict[str, Any] | None = Field(None, description="Findings of the agent `probe`")


class TrialResult(BaseModel):
    """How a trial ended. `reward` repeats the verdict's, and is None without one."""

    trial_id: str
    reward: float | None
    exit_status: str
    eval_report: dict[str, Any] = Field(default_factory=dict)
    agent_metrics: AgentMetrics = Field(default_factory=AgentMetrics)
    verdict: Verdict

    @classmethod
    def of(
        cls,
        trial_id: str,
        verdict: Verdict,
        metrics: AgentMetrics | None = None,
        exit_status: str | None = None,
    ) -> TrialResult:
        """The result that belongs to a verdict."""
        return cls(
            trial_id=trial_id,
            reward=verdict.reward,
            exit_status=exit_status or exit_status_of(verdict),
            eval_report=verdict.report,
            agent_metrics=metrics or AgentMetrics(),
            verdict=verdict,
        )


class TrialStatus(BaseModel):
    """A trial as `PUT`, `GET` and `DELETE /trials/{id}` answer it."""

    trial_id: str
    state: TrialState
    phase: Phase
    queue_position: int | None = Field(None, description="0 is next; None when not queued")
    age_s: float = Field(0.0, description="Since it was accepted; since its end, once ended")
    result: TrialResult | None = None


class Health(BaseModel):
    """What `GET /health` answers."""

    status: str
    instance_id: str
    capacity: int
    running: int
    queued: int
    sandbox: str
    images: str = Field("host", description="What builds images; empty where Harbor does")
    limits: dict[str, str] = Field(description="How each resource limit is enforced")
    harbor_version: str
    agent_timeout_s: float
    trial_timeout_s: float
    tasks_dir: str
    tasks_found: int
    agents: list[str]

    @property
    def sandbox_kind(self) -> str:
        """The kind of sandbox by which results of task checks are told apart."""
        return sandbox_kind(self.sandbox, self.images)


def sandbox_kind(sandbox: str, images: str) -> str:
    """A name for a sandbox with what builds its images: another one runs other tasks."""
    return sandbox if images in ("", "host") else f"{sandbox} with {images}"


_EXIT_STATUS = {
    Cause.AGENT_TIMEOUT: "TimeLimitExceeded",
    Cause.TOKEN_BUDGET: "SequenceLengthLimitExceeded",
    Cause.TURN_LIMIT: "LimitsExceeded",
    Cause.MALFORMED_ACTIONS: "RepeatedFormatError",
    Cause.TASK_NOT_FOUND: "TaskNotFound",
}


def exit_status_of(verdict: Verdict) -> str:
    """The exit status, in the recipe's words, of an agent that gave none itself."""
    if verdict.cause is None:
        return "Submitted"
    if verdict.cause in _EXIT_STATUS:
        return _EXIT_STATUS[verdict.cause]
    return "AgentError" if verdict.kind is VerdictKind.GRADED else "NoVerdict"
