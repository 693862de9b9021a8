"""mini-swe-agent itself over a session server: the samples are a hand-computed truth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would fetch one
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
pytest.importorskip("minisweagent")

from client_engine import Slow, StepEngine
from client_truth import (
    Line,
    bash_call,
    check_samples,
    system_with_tools,
    tool_result,
    user,
)
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL
from session_helpers import Agent

pytestmark = pytest.mark.agent_env

SYSTEM = "You work in a shell."
NO_CALL = "No tool calls found in the response. Every response MUST include at least one tool call."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def run_mini(base_url: str, task: str, folder: Path) -> dict[str, Any]:
    """The agent with its own loop, model class and shell; how it ended."""
    kwargs = {"api_base": base_url, "api_key": "none", "timeout": 1.5, "max_retries": 3}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=kwargs, cost_tracking="ignore_errors"
    )
    environment = LocalEnvironment(cwd=str(folder))
    templates = {"system_template": SYSTEM, "instance_template": "{{ task }}"}
    return DefaultAgent(model, environment, **templates).run(task)


def step(number: int, command: str = "") -> str:
    return bash_call(f"step {number}", command or f"printf '%s\\n' {number}é")


def observation(number: int) -> str:
    shown = f"<returncode>0</returncode>\n<output>\n{number}é\n</output>"
    return "\n" + tool_result(shown)


def begun(task: str) -> Line:
    return Line().prompt(system_with_tools(SYSTEM, [BASH_TOOL]) + user(task))


def test_twenty_turns_with_retries_a_malformed_answer_and_a_sub_agent(
    url: str, steps: StepEngine, http: httpx.Client, tmp_path: Path
) -> None:
    agent = Agent(url, http, max_seq_len=100_000)
    steps.reset(
        [step(1), step(2), 503, step(3), step(4), Slow("lost"), step(5), "I forgot to call."]
        + [step(number) for number in range(6, 20)]
        + [step(20, SUBMIT)]
    )
    assert run_mini(f"{agent.url}/v1", "Count.", tmp_path)["exit_status"] == "Submitted"
    line = begun("Count.")
    for number in range(1, 6):
        line = line.answer(step(number)).prompt(observation(number))
    # The agent drops an answer without a call from its history, and tells what was wrong.
    malformed = line.answer("I forgot to call.")
    line = line.prompt(user(NO_CALL))
    for number in range(6, 20):
        line = line.answer(step(number)).prompt(observation(number))
    line = line.answer(step(20, SUBMIT))
    assert len(line.turns()) == 20
    check_samples(agent.samples(), [line, malformed], steps)

    steps.reset_script([step(1), step(2, SUBMIT)])
    assert run_mini(f"{agent.url}/v1", "Another task.", tmp_path)["exit_status"] == "Submitted"
    other = begun("Another task.").answer(step(1)).prompt(observation(1)).answer(step(2, SUBMIT))
    check_samples(agent.samples(), [line, malformed, other], steps)
