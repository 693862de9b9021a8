"""Which kinds of sandbox a server looks for, and how each is made to be found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from miles_core.agent_server.environments import BUBBLEWRAP, CONTAINERS, Sandbox
from miles_core.agent_server.reaper.daytona import Daytona, labels
from miles_core.agent_server.reaper.engines import Engine
from miles_core.agent_server.reaper.kernel import Bubblewrap
from miles_core.agent_server.reaper.left import Kind
from miles_core.agent_server.reaper.owner import Owner

LIFETIMES = {
    "modal": "sandbox_timeout_secs",
    "e2b": "sandbox_timeout_secs",
    "tensorlake": "timeout_secs",
    "vercel": "sandbox_lifetime_seconds",
}
"""Kinds that end a sandbox by themselves after a number of seconds, with Harbor's name for it."""


def kinds_of(owner: Owner, cgroups: Iterable[Path] = ()) -> tuple[list[Kind], list[str]]:
    """The kinds of an owner that can be listed, and the names of those that cannot.

    `cgroups` are where this server has those of its own bubblewrap sandboxes.
    """
    listed: list[Kind] = [Engine(name, owner) for name in CONTAINERS if name in owner.kinds]
    if BUBBLEWRAP in owner.kinds:
        listed.append(Bubblewrap(cgroups))
    if "daytona" in owner.kinds:
        listed.append(Daytona(owner))
    known = {BUBBLEWRAP, *CONTAINERS, "daytona"}
    return listed, [kind for kind in owner.kinds if kind not in known]


def arguments(sandbox: Sandbox, owner: str, trial_id: str, lifetime_s: float) -> dict[str, Any]:
    """What Harbor's environment of a trial is given, so that it is found, or ends by itself."""
    if sandbox.name in CONTAINERS:
        return {"trial_id": trial_id, "owner": owner}
    if sandbox.ours:
        return {"trial_id": trial_id}
    if sandbox.name == "daytona":
        idle = math.ceil(lifetime_s / 60)
        return {"labels": labels(owner, trial_id), "auto_stop_interval_mins": idle}
    if sandbox.name in LIFETIMES:
        return {LIFETIMES[sandbox.name]: math.ceil(lifetime_s)}
    return {}


def warning(kind: str) -> str:
    """What a person must know of a kind that cannot be listed."""
    told = f"sandboxes of {kind} cannot be listed; one that a killed server leaves "
    if kind in LIFETIMES:
        return told + "ends by itself when a trial would have to be over"
    return told + "stays until you end it with its provider's tools"
