"""One place in a group: open a session, run a trial, join its verdict with its samples."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from miles_core.agent_server.client import AgentServerClient
from miles_core.agent_server.protocol import TrialRequest
from miles_core.config.schema import MilesConfig
from miles_core.data.source import Row
from miles_core.rollout.trajectory import Place, Trajectory
from miles_core.sessions.client import SessionClient
from miles_core.sessions.protocol import SessionHandle, SessionSamples
from miles_core.verdicts import Cause, Verdict, VerdictKind

# A live trial is polled far more often than this; only a dead driver lets a lease run out.
LEASE_S = 60.0


@dataclass
class TrialRunner:
    """Runs single trials with everything that they have in common."""

    config: MilesConfig
    agents: AgentServerClient
    sessions: SessionClient
    on_start: Callable[[Place, int, str], None]

    async def run(self, place: Place, row: Row, attempt: int) -> Trajectory:
        """One trial for `place`; whatever goes wrong ends in a `no_verdict`, never in a reward."""
        # The id sorts by step and place, and its random part makes it unique over restarts.
        trial_id = (
            f"s{place.step:04d}-{place.group_id.rpartition('-')[2]}-m{place.member:02d}"
            f"-k{attempt}-{uuid.uuid4().hex[:8]}"
        )
        started = time.monotonic()
        self.on_start(place, attempt, trial_id)
        trajectory = Trajectory(
            trial_id, place, attempt, Verdict.no_verdict(Cause.SESSION_FAILED, "no session")
        )
        try:
            handle = await self.sessions.create(
                max_seq_len=self.config.rollout.max_seq_len,
                max_turns=self.config.rollout.max_turns,
                sampling_params=self._sampling_params(),
                routed_experts=self.config.training.use_rollout_routing_replay,
            )
        except httpx.HTTPError as error:
            trajectory.verdict = Verdict.no_verdict(
                Cause.SESSION_FAILED, f"no session could be opened: {error!r}"
            )
            trajectory.seconds = time.monotonic() - started
            return trajectory
        try:
            await self._run_in_session(trajectory, row, handle)
        finally:
            await self._drop(handle)
        trajectory.seconds = time.monotonic() - started
        return trajectory

    def _sampling_params(self) -> dict[str, Any]:
        rollout = self.config.rollout
        return {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_tokens": rollout.rollout_max_response_len,
        }

    async def _run_in_session(
        self, trajectory: Trajectory, row: Row, handle: SessionHandle
    ) -> None:
        rollout = self.config.rollout
        request = TrialRequest.model_validate(
            {
                **row.metadata,
                "instance_id": row.instance_id,
                "agent_name": row.agent_name,
                "base_url": handle.base_url,
                "model": "openai/policy",
                "sampling_params": self._sampling_params(),
                "max_seq_len": rollout.max_seq_len,
                "max_turns": rollout.max_turns,
                "lease_s": LEASE_S,
                "session_server_id": handle.server_url.split("://", 1)[-1],
                "session_server_instance_id": handle.instance_id,
            }
        )
        result = await self.agents.run(
            trajectory.trial_id, request, timeout_s=self.config.agent_server.agent_trial_timeout
        )
        trajectory.agent_metrics = result.agent_metrics.model_dump(mode="json")
        trajectory.exit_status = result.exit_status
        try:
            recorded = await self.sessions.samples(handle)
        except (httpx.HTTPError, ValueError) as error:
            trajectory.verdict = _without_samples(result.verdict, error)
            return
        trajectory.model_calls = recorded.model_calls
        trajectory.session = recorded.model_dump(
            include={"retries", "tool_lists", "ignored_fields", "end_reason"}
        )
        trajectory.samples = [sample.model_dump() for sample in recorded.samples]
        trajectory.verdict = join_verdict(result.verdict, recorded)

    async def _drop(self, handle: SessionHandle) -> None:
        """Free the session; a server that is gone has freed it already."""
        try:
            await self.sessions.delete(handle)
        except httpx.HTTPError:
            return


def _without_samples(verdict: Verdict, error: Exception) -> Verdict:
    if not verdict.trainable:
        return verdict
    return Verdict.no_verdict(Cause.SESSION_FAILED, f"the samples are lost: {error!r}")


def join_verdict(verdict: Verdict, recorded: SessionSamples) -> Verdict:
    """The agent server's verdict in the light of what the session saw.

    A grade that no model call led to, or that came after the engine or the session had failed, says
    nothing about the policy. A session that ended for its budget gives the grade its cause.
    """
    if not verdict.trainable:
        return verdict
    if recorded.model_calls == 0 or not recorded.samples:
        return Verdict.no_verdict(Cause.NO_MODEL_CALL, "the session recorded no model call")
    reason = recorded.end_reason
    if reason == Cause.ENGINE_FAILED:
        return Verdict.no_verdict(Cause.ENGINE_FAILED, "a model call of this trial failed")
    if reason == Cause.SESSION_FAILED:
        return Verdict.no_verdict(Cause.SESSION_FAILED, "a model call of this trial was refused")
    if verdict.kind is VerdictKind.GRADED and verdict.cause is None and reason is not None:
        return verdict.model_copy(update={"cause": Cause(reason)})
    return verdict
