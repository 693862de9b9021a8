"""The libraries openai and litellm over a session server: the samples are a hand-computed truth."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would fetch one
pytest.importorskip("openai")
pytest.importorskip("litellm")

from client_engine import StepEngine
from client_episode import run_episode
from client_openai import LitellmClient, OpenAIClient
from client_truth import check_samples
from session_helpers import Agent

pytestmark = pytest.mark.agent_env


@pytest.mark.parametrize("kind", [OpenAIClient, LitellmClient])
def test_an_episode_with_retries_drops_and_a_branch(
    kind: Any, url: str, steps: StepEngine, http: httpx.Client
) -> None:
    agent = Agent(url, http, max_seq_len=100_000, sampling_params={"temperature": 1.0})
    lines = run_episode(kind(f"{agent.url}/v1"), steps)
    assert len(lines[0].turns()) == 20
    check_samples(agent.samples(), lines, steps)
