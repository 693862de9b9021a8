"""Whether two requests of one id ask for the same trial.

A client that lost an answer sends its request again, also to a server that was started anew. What
was asked for is known then by digests, so that no secret of a request is kept.
"""

from __future__ import annotations

import hashlib
import json

from miles_core.agent_server.protocol import TrialRequest

NOT_COMPARED = frozenset({"lease_s", "deadline_s", "trial_id"})
"""Fields that say how long a client waits, and which trial it means."""


class TrialConflict(Exception):
    """A trial of this id was started by a request that asks for something else."""

    def __init__(self, trial_id: str, fields: list[str]) -> None:
        named = ", ".join(f"{name!a}"[1:-1] for name in fields)
        super().__init__(f"{trial_id} was started with another value of: {named}")


def digests(trial_id: str, request: TrialRequest) -> dict[str, str]:
    """For each field that decides a trial, metadata too, a digest of its value; null is absent."""
    fields = {name: getattr(request, name) for name in type(request).model_fields}
    found = {}
    for name, value in {**fields, **(request.model_extra or {})}.items():
        if name not in NOT_COMPARED and value is not None:
            text = json.dumps([trial_id, name, value], sort_keys=True)
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return found


def differing(known: dict[str, str], asked: dict[str, str]) -> list[str]:
    """The names of the fields whose digests differ."""
    return sorted(name for name in known | asked if known.get(name) != asked.get(name))
