"""Harbor's configuration of each kind of agent, and whether Harbor builds the agent from it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from harbor.agents.factory import AgentFactory  # noqa: E402
from harbor.models.trial.config import AgentConfig  # noqa: E402

from miles_core.agent_server import environments  # noqa: E402
from miles_core.agent_server.agents import AgentJob, choose, load_agent_config  # noqa: E402
from miles_core.agent_server.agents.address import inside, relayed  # noqa: E402
from miles_core.agent_server.agents.mini import mini_job  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.agent_server.runner import quiet_libraries  # noqa: E402
from miles_core.agent_server.settings import ServerSettings  # noqa: E402
from miles_core.agent_server.tasks import TaskProblem  # noqa: E402

pytestmark = pytest.mark.agent_env

URL = "http://10.1.2.3:4567/sessions/s/v1"
INSIDE = "http://127.0.0.1:4567/sessions/s/v1"


@pytest.fixture(autouse=True, scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in the server: no library fetches anything when it is imported."""
    quiet_libraries(tmp_path_factory.mktemp("quiet"))


def request(agent: str, **fields: object) -> TrialRequest:
    values = {"instance_id": "t", "agent_name": agent, "base_url": URL, **fields}
    return TrialRequest.model_validate(values)


def config_of(agent: str, sandbox: str, tmp_path: Path, **fields: object) -> AgentConfig:
    settings = ServerSettings(
        tasks_dir=tmp_path,
        trials_dir=tmp_path,
        sandbox=environments.find(sandbox),
        agent_config=load_agent_config(None),
    )
    return asyncio.run(choose.agent_config("x", request(agent, **fields), settings, 60.0))


@pytest.mark.parametrize(
    ("sandbox", "path"),
    [("bubblewrap", "mini:MiniSweAgent"), ("docker", "mini_outside:MiniSweAgentOutside")],
)
def test_mini_swe_agent_is_never_installed(tmp_path: Path, sandbox: str, path: str) -> None:
    config = config_of("mini-swe-agent", sandbox, tmp_path)
    assert config.import_path == f"miles_core.agent_server.agents.{path}"


@pytest.mark.slow
@pytest.mark.parametrize(("sandbox", "url"), [("bubblewrap", INSIDE), ("docker", URL)])
def test_an_installed_agent_finds_the_session(tmp_path: Path, sandbox: str, url: str) -> None:
    config = config_of("qwen-coder", sandbox, tmp_path)
    assert config.env["OPENAI_BASE_URL"] == config.base_url == url
    assert AgentFactory.create_agent_from_config(config, logs_dir=tmp_path).name() == "qwen-coder"


def test_the_forked_agent_goes_through_the_relay() -> None:
    job = AgentJob(request("mini-swe-agent"), load_agent_config(None))
    assert mini_job(job, "do")["base_url"] == INSIDE
    assert choose.relays(job.request) == [(4567, "10.1.2.3", 4567)]
    assert choose.relays(request("terminus-2")) == choose.relays(request("oracle")) == []


def test_a_wrong_setting_of_mini_swe_agent_is_named_with_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("agent:\n  step_limits: 5\n")
    with pytest.raises(ValueError, match=r"agent\.step_limits is not .*did you mean step_limit\?"):
        load_agent_config(path)


def test_addresses() -> None:
    assert relayed("http://[::1]/v1") == (80, "::1", 80)
    assert inside("http://[::1]/v1?a=b") == "http://127.0.0.1:80/v1?a=b"
    with pytest.raises(TaskProblem, match="base_url"):
        choose.relays(request("mini-swe-agent", base_url="https://host:1/v1"))


ALONE = """import sys, miles_core.agent_server.runner
from miles_core.agent_server.agents.terminus import Terminus
assert "litellm" not in sys.modules
"""
WHOLE = """from harbor.agents.terminus_2 import Terminus2
from harbor.llms.lite_llm import LiteLLM
assert isinstance(LiteLLM, type) and Terminus2 not in Terminus.__mro__
"""


@pytest.mark.parametrize("more", ["", pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_no_agent_of_ours_costs_the_import_of_litellm(more: str) -> None:
    """And Harbor's own Terminus2 is whole for those who name it by its path."""
    subprocess.run([sys.executable, "-c", ALONE + more], check=True, timeout=120)
