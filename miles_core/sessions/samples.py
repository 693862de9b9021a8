"""From the recorded turns of a session to the samples that are trained on."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from miles_core.sessions.journal import Journal
from miles_core.sessions.session import Session
from miles_core.sessions.tree import Tree, Turn


@dataclass(frozen=True)
class Snapshot:
    """A session at one moment: its turns, where the rest of them is, and what is told beside."""

    tree: Tree
    journal: Journal
    told: dict[str, Any]

    @classmethod
    def of(cls, session: Session, journal: Journal) -> Snapshot:
        """Taken by the thread that records."""
        told = {
            "session_id": session.session_id,
            "ignored_fields": sorted(session.ignored),
            "end_reason": session.end_reason,
        }
        return cls(session.tree.snapshot(), journal, told)


def cut_samples(snapshot: Snapshot) -> bytes:
    """JSON of `SessionSamples`: one for each branch, each turn trained in the first that has it.

    Raises ValueError when a kept turn would be trained not once.
    """
    tree = snapshot.tree
    kept = tree.kept()
    used = {turn.parent for turn in kept}
    leaves = [turn for turn in kept if turn not in used]
    trained: set[Turn] = set()
    samples = [_sample(leaf, trained, snapshot.journal) for leaf in leaves]
    if trained != set(kept):
        raise ValueError(f"{len(trained)} of {len(kept)} recorded turns are in the samples")
    whole = {
        **snapshot.told,
        "model_calls": len(kept),
        "retries": len(tree.turns) - len(kept),
        "tool_lists": len({turn.tools_key for turn in tree.turns if turn.tools_key}),
        "samples": samples,
    }
    return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)


def _sample(leaf: Turn, trained: set[Turn], journal: Journal) -> dict[str, Any]:
    path = leaf.path()
    tokens = leaf.ids()
    mask = np.zeros(len(tokens), np.int8)
    logprobs = np.zeros(len(tokens), np.float64)
    spans = []
    for turn in path:
        if turn in trained:
            continue
        trained.add(turn)
        end = turn.length
        start = end - len(turn.output_ids)
        mask[start:end] = 1
        logprobs[start:end] = turn.logprobs
        spans.append(_span(turn, start, end))
    experts = b"".join(journal.blob(turn.experts) for turn in path if turn.experts)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "turns": spans,
        "routed_experts": base64.b64encode(experts).decode() if experts else None,
    }


def _span(turn: Turn, start: int, end: int) -> dict[str, Any]:
    return {
        "rid": turn.rid,
        "start": start,
        "end": end,
        "weight_version": min(version for version, _, _ in turn.versions),
        "weight_versions": [
            {"version": version, "start": start + first, "end": start + last}
            for version, first, last in turn.versions
        ],
        "finish_reason": turn.finish_reason,
    }
