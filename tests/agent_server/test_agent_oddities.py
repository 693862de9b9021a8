"""Odd tasks, and the example tasks: what `oracle` and `nop` end in, and why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_server_helpers import Server  # noqa: E402
from odd_tasks import ODD, make  # noqa: E402

from miles_core.agent_server.protocol import TrialResult  # noqa: E402

pytestmark = pytest.mark.agent_env

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
QUICK = [pytest.param(n, marks=[] if ODD[n].quick else pytest.mark.slow) for n in sorted(ODD)]


def ending(result: TrialResult) -> object:
    return result.verdict.cause if result.reward is None else result.reward


@pytest.mark.parametrize("name", QUICK)
def test_odd_task_ends_as_it_must(server: Server, tasks: Path, name: str) -> None:
    make(tasks, name)
    for agent, expected in zip(("oracle", "nop"), ODD[name].ends, strict=True):
        result = server.run(name, agent)
        assert ending(result) == expected, (agent, ODD[name].why, result.verdict)
        assert "Traceback" not in result.verdict.detail


def test_reports_of_odd_tasks(server: Server, tasks: Path) -> None:
    make(tasks, "ctrf")
    report = server.run("ctrf", "nop").eval_report
    counts = {"tool": "pytest", "tests": 2, "passed": 1, "failed": 1, "failed_tests": ["test_b"]}
    assert report == {"reward": 0.0, "ctrf": counts}
    make(tasks, "steps-mean")
    result = server.run("steps-mean", "oracle")
    listed = [{"name": "one", "rewards": {"reward": 0.5}}]
    listed.append({"name": "two", "rewards": {"reward": 1.0}})
    assert result.eval_report == {"reward": 0.75, "steps": listed}
    assert (result.agent_metrics.eval_time or 0.0) > 0.0


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, since the ids are those of the examples."""
    root = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, root / "tasks")
    made = Server(root, root / "tasks", "--max-concurrent", "2")
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_every_example_task(examples: Server, agent: str, reward: float) -> None:
    names = examples.call(lambda client: client.tasks())
    assert len(names) == len(list(EXAMPLES.glob("*/task.toml"))) > 0
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(names, pool.map(lambda n: examples.run(n, agent), names), strict=True))
    assert {name: ending(result) for name, result in results.items()} == dict.fromkeys(
        names, reward
    )
