"""An engine's routed experts on their way: session, trial, dump, trainer."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from session_helpers import TOKEN, ScriptedEngine

from miles_core.modeling.hf_config import MoeSpec
from miles_core.rollout.dump import write_rollout
from miles_core.rollout.loop import Group
from miles_core.rollout.trajectory import Place, Trajectory
from miles_core.sessions.client import SessionClient
from miles_core.sessions.families import ChatFamily
from miles_core.training.batch import load_rollout
from miles_core.training.routing import engine_experts
from miles_core.verdicts import Verdict

LAYERS, EXPERTS, TOP = 3, 300, 2
USER = {"role": "user", "content": "go on"}
DONE = {"role": "assistant", "content": "done"}


def experts(first: int, end: int) -> bytes:
    """Of the tokens from `first` to before `end`: two experts per layer that tell the token."""
    layers = np.arange(LAYERS)[None, :, None]
    tokens = np.arange(first, end)[:, None, None]
    return ((tokens + layers * 7 + np.arange(TOP) * 50) % EXPERTS).astype(np.int32).tobytes()


def dumped(path: Path, samples: list[dict[str, Any]]) -> Any:
    place = Place(0, "s0000-g00", 0, "task")
    made = Trajectory("s0000-g00-m0", place, 0, Verdict.graded(1.0, {}), samples)
    made.save(path / "trials")
    kept = Trajectory.load(path / "trials" / made.trial_id / "trajectory.json")
    write_rollout(path / "0.pt", 0, 1, ["task"], [Group("s0000-g00", "task", [kept])])
    return load_rollout(path / "0.pt")


async def test_each_token_keeps_its_experts(
    server_url: str, engine: ScriptedEngine, family: ChatFamily, tmp_path: Path
) -> None:
    client = SessionClient([server_url], TOKEN)
    handle = await client.create(1000, routed_experts=True)
    engine.experts = experts
    engine.script = [family.render_output(DONE)] * 3
    async with httpx.AsyncClient() as agent:
        for messages in ([USER], [USER, DONE, USER], [USER, DONE, {**USER, "content": "no"}]):
            body = {"messages": messages}
            answer = await agent.post(f"{handle.base_url}/chat/completions", json=body)
            answer.raise_for_status()
    engine.experts = None
    recorded = await client.samples(handle)
    await client.delete(handle)
    await client.aclose()
    batch = dumped(tmp_path, [sample.model_dump() for sample in recorded.samples])
    assert len(batch.samples) == 2
    for sample in batch.samples:
        rows = len(sample) - 1
        want = np.frombuffer(experts(0, rows), np.int32).reshape(rows, LAYERS, TOP)
        got = engine_experts(sample, MoeSpec(EXPERTS, TOP, 8, sparse=(False, True, True)))
        assert got.dtype == torch.int16
        assert torch.equal(got[:-1].int(), torch.from_numpy(want[:, 1:].copy()))
        assert (got[-1] == -1).all()


def sample(experts: bytes | None) -> dict[str, Any]:
    encoded = None if experts is None else base64.b64encode(experts).decode()
    return {
        "tokens": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -1.0, -1.0],
        "turns": [],
        "routed_experts": encoded,
    }


def test_a_sample_without_experts_has_none(tmp_path: Path) -> None:
    assert dumped(tmp_path, [sample(None)]).samples[0].engine_experts is None


@pytest.mark.parametrize(
    ("experts", "text"),
    [
        (bytes(12), "12 bytes for 2 tokens"),
        (np.array([1, 2, 3, 70000], np.int32).tobytes(), "no expert 70000"),
    ],
)
def test_experts_that_are_none_name_the_trial(experts: bytes, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text) as failure:
        dumped(tmp_path, [sample(experts)])
    assert "s0000-g00-m0" in str(failure.value)
