"""Harbor's terminus-2 with its own litellm over a session server: a hand-computed truth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would fetch one
pytest.importorskip("harbor")
pytest.importorskip("litellm")

from client_engine import Slow, StepEngine
from client_truth import Line, check_samples, user
from harbor.agents.terminus_2 import Terminus2
from harbor.models.agent.context import AgentContext
from session_helpers import Agent

pytestmark = pytest.mark.agent_env


class Terminal:
    """A terminal that shows what was typed last, in the place of tmux in a sandbox."""

    def __init__(self) -> None:
        self.typed = ""

    async def is_session_alive(self) -> bool:
        return True

    async def send_keys(self, keys: str, **_: Any) -> None:
        self.typed += keys

    async def get_incremental_output(self) -> str:
        shown, self.typed = self.typed, ""
        return f"$ {shown}"

    async def capture_pane(self, **_: Any) -> str:
        return "$ "


def step(number: int, complete: bool = False) -> str:
    """An answer; `complete` claims that the task is done."""
    said = {
        "analysis": f"é {number}",
        "plan": "count on",
        "commands": [{"keystrokes": f"echo {number}\n", "duration": 0.0}],
        "task_complete": complete,
    }
    return json.dumps(said, ensure_ascii=False, indent=2)


async def run_terminus(base_url: str, folder: Path, **options: Any) -> Terminus2:
    agent = Terminus2(
        logs_dir=folder,
        model_name="openai/policy",
        api_base=base_url,
        llm_kwargs={"api_key": "none"},
        llm_call_kwargs={"timeout": 1.5, "max_retries": 3},
        record_terminal_session=False,
        **options,
    )
    agent._session = Terminal()
    agent._build_skills_section = _no_skills
    await agent.run("Count.", None, AgentContext())
    return agent


async def _no_skills(environment: Any) -> None:
    return None


async def test_twenty_turns_with_retries_and_a_malformed_answer(
    url: str, steps: StepEngine, http: httpx.Client, tmp_path: Path
) -> None:
    agent = Agent(url, http, max_seq_len=100_000)
    script = [step(1), step(2), 503, step(3), step(4), Slow("lost"), step(5), "no JSON"]
    script += [step(number) for number in range(7, 19)] + [step(19, True), step(20, True)]
    steps.reset(script)
    terminus = await run_terminus(f"{agent.url}/v1", tmp_path)
    prompts = [m["content"] for m in terminus._chat.messages if m["role"] == "user"]
    answers = [*map(step, range(1, 6)), "no JSON", *map(step, range(7, 19))]
    answers += [step(19, True), step(20, True)]
    assert [m["content"] for m in terminus._chat.messages if m["role"] == "assistant"] == answers
    assert prompts[3] == "$ echo 3\n" and prompts[6].startswith("Previous response had parsing")
    line = Line()
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        line = line.prompt(("\n" if number else "") + user(prompt)).answer(answer)
    assert len(line.turns()) == 20
    check_samples(agent.samples(), [line], steps)


async def test_context_compaction_is_branches(
    url: str, steps: StepEngine, http: httpx.Client, tmp_path: Path
) -> None:
    """Its three sub-agents, and the conversation that goes on from their summary."""
    agent = Agent(url, http, max_seq_len=100_000)
    said = iter(range(1, 100))

    def say(prompt: str) -> str:
        asked = prompt.rpartition("<|im_start|>user\n")[2]
        if asked.startswith("You are about to hand off"):
            return "a summary"
        if asked.startswith("You are picking up work"):
            return "some questions?"
        if asked.startswith("The next agent has a few questions"):
            return "some answers"
        number = next(said)
        return step(number, number >= 19)

    steps.reset([], say)
    limits = {"max_input_tokens": 2600, "max_output_tokens": 4000}
    terminus = await run_terminus(
        f"{agent.url}/v1",
        tmp_path,
        model_info={**limits, "input_cost_per_token": 0.0, "output_cost_per_token": 0.0},
        proactive_summarization_threshold=1000,
    )
    asked = {name: sub_agent_prompt(tmp_path, name) for name in ("summary", "questions", "answers")}
    messages = terminus._chat.messages
    assert messages[1] == {"role": "user", "content": asked["questions"]}
    done = 20 - sum(message["role"] == "assistant" for message in messages[3:])

    before = Line().prompt(user(messages[0]["content"])).answer(step(1))
    for number in range(2, done + 1):
        before = before.prompt("\n" + user(f"$ echo {number - 1}\n")).answer(step(number))
    before = before.prompt("\n" + user(asked["summary"])).answer("a summary")
    before = before.prompt("\n" + user(asked["answers"])).answer("some answers")
    questions = Line().prompt(user(asked["questions"])).answer("some questions?")
    handed = user(messages[0]["content"]) + user(asked["questions"])
    handed += "<|im_start|>assistant\nsome questions?<|im_end|>\n"
    after = Line().prompt(handed)
    prompts = [m["content"] for m in messages[3:] if m["role"] == "user"]
    for number, prompt in enumerate(prompts, done + 1):
        before_it = "" if number == done + 1 else "\n"
        after = after.prompt(before_it + user(prompt)).answer(step(number, number >= 19))
    assert len(before.turns()) + len(after.turns()) == 20 + 2
    check_samples(agent.samples(), [before, questions, after], steps)


def sub_agent_prompt(folder: Path, name: str) -> str:
    """What a sub-agent was asked, as terminus-2 noted it."""
    noted = json.loads((folder / f"trajectory.summarization-1-{name}.json").read_text())
    return noted["steps"][-2]["message"]
