"""The prompts of a demonstration are those that mini-swe-agent makes of the same configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.agent_env
pytest.importorskip("minisweagent")


def test_messages_are_those_of_the_agent(tmp_path):
    import litellm
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    from miles_core.modelinit.demos import SUBMIT, Prompts

    path = Path(__file__).parents[2] / "examples" / "agents" / "terse.yaml"
    config = yaml.safe_load(path.read_text())
    commands = iter(["echo mofe > kiba.txt", "ls kiba.txt; false", SUBMIT])
    asked = []

    class Scripted(LitellmModel):
        def _query(self, messages, **kwargs):
            asked.append(messages)
            function = {"name": "bash", "arguments": f'{{"command": "{next(commands)}"}}'}
            call = {"id": "call_0", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            return litellm.ModelResponse(choices=[{"message": message}])

    model = Scripted(model_name="m", cost_tracking="ignore_errors", **config["model"])
    env = LocalEnvironment(cwd=str(tmp_path), **config["environment"])
    agent = DefaultAgent(model, env, **config["agent"])
    assert agent.run("Write mofe to kiba.txt")["exit_status"] == "Submitted"

    prompts = Prompts.load(path)
    assert asked[0] == prompts.opening("Write mofe to kiba.txt")
    said = [m for m in asked[-1] if m["role"] == "tool"]
    assert said == [prompts.observed(0, ""), prompts.observed(1, "kiba.txt\n")]
