"""Whole trials in podman: agents, limits, what an agent leaves, what the server leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
from agent_container_helpers import (  # noqa: E402
    DOCKERFILE,
    left,
    own_podman,
    owner_of,
    podman,
    remove_all,
)
from agent_scripted_model import DONE, ScriptedModel, bash, text  # noqa: E402
from agent_server_helpers import TOML, Server, make_task  # noqa: E402

from miles_core.agent_server import environments  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = [pytest.mark.agent_env, pytest.mark.slow]

PUBLIC = TOML.replace('network_mode = "no-network"\n', "")
LISTED = """#!/bin/bash
echo 0 > /logs/verifier/reward.txt
for one in /proc/[0-9]*; do tr '\\0' ' ' < $one/cmdline; echo; done
exit 0
"""
DAEMON = "setsid sh -c 'while :; do sleep 1; done # name={}' >/dev/null 2>&1 </dev/null &"
FORGER = (
    "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' "
    ">/dev/null 2>&1 </dev/null &"
)
HEALTH = f"[environment.healthcheck]\ncommand = '''{DAEMON.format('started')}'''\nretries = 2\n"
COMPOSE = """services:
  main:
    depends_on: [store]
    volumes: ["shared:/shared"]
  store:
    image: localhost/miles-tests:1
    command: ["sh", "-c", "echo 42 > /shared/answer; sleep 1000"]
    volumes: ["shared:/shared"]
volumes:
  shared:
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("podman")
    made = own_podman(root)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.items():
            patch.setenv(name, value)
        yield made
    remove_all(made, root)


@pytest.fixture(scope="module")
def server(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    make_task(root / "tasks", "answer", dockerfile=DOCKERFILE)
    made = Server(root, root / "tasks", "--sandbox", "podman", "--agent-timeout", "100")
    yield made
    made.stop()


def typed(line: str, wait: float = 0.3) -> dict[str, Any]:
    """An answer that types a line, and waits for `wait` seconds."""
    commands = [{"keystrokes": line + "\n", "duration": wait}]
    return text(json.dumps({"analysis": "", "plan": "", "commands": commands}))


FINISHED = text(json.dumps({"analysis": "", "plan": "", "commands": [], "task_complete": True}))


def until(true: Callable[[], Any], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.1)


def last_output(server: Server) -> str:
    path = max(server.trials.glob("*/harbor/*/verifier/test-stdout.txt"), key=os.path.getmtime)
    return path.read_text()


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
@pytest.mark.parametrize("toml", [TOML, PUBLIC])
def test_verdicts(
    server: Server, variables: dict[str, str], agent: str, reward: float, toml: str
) -> None:
    name = "public" if toml is PUBLIC else "answer"
    make_task(server.tasks, name, dockerfile=DOCKERFILE, toml=toml)
    result = server.run(name, agent)
    assert (result.verdict.kind, result.reward) == (VerdictKind.GRADED, reward), result.verdict
    assert left(variables, owner_of(server.trials)) == {}


def test_a_task_without_a_network_has_none(server: Server) -> None:
    check = "#!/bin/bash\nls /sys/class/net\necho 1 > /logs/verifier/reward.txt\n"
    make_task(server.tasks, "severed", dockerfile=DOCKERFILE, test=check)
    server.run("severed", "nop")
    assert last_output(server).split() == ["lo"]


def test_a_step_of_a_dockerfile_is_run_once(server: Server) -> None:
    steps = DOCKERFILE + "RUN cat /proc/sys/kernel/random/uuid > /app/id\nRUN true\n"
    test = "cat /app/id\necho 1 > /logs/verifier/reward.txt\n"
    make_task(server.tasks, "steps", dockerfile=steps, test=test)
    seen = set()
    for _ in range(2):
        server.run("steps", "nop")
        seen.add(last_output(server))
    assert len(seen) == 1 and len(seen.pop().strip()) == 36


def test_services_and_their_volume(server: Server, variables: dict[str, str]) -> None:
    solve = (
        "#!/bin/bash\nuntil [ -s /shared/answer ]; do :; done\ncp /shared/answer /app/answer.txt\n"
    )
    task = make_task(server.tasks, "services", dockerfile=DOCKERFILE, toml=PUBLIC, solve=solve)
    (task / "environment/docker-compose.yaml").write_text(COMPOSE)
    result = server.run("services")
    assert result.reward == 1.0, result.verdict
    assert left(variables, owner_of(server.trials)) == {}


def test_mini_swe_agent_works_from_outside(server: Server) -> None:
    """The sandbox has no network, no Python and no agent in it; limits hold all the same."""
    script = [bash("sleep 30; true"), bash("uname -s; echo 42 > answer.txt"), bash(DONE)]
    config = server.root / "agent.yaml"
    config.write_text("environment:\n  timeout: 2\n")
    root = server.root / "own"
    root.mkdir()
    own = Server(root, server.tasks, "--sandbox", "podman", "--agent-config", str(config))
    model = ScriptedModel(script)
    try:
        result = own.run("answer", "mini-swe-agent", base_url=model.url)
    finally:
        model.close()
        own.stop()
    assert result.reward == 1.0, result.verdict
    assert (result.exit_status, result.agent_metrics.turns) == ("Submitted", 3)
    assert "timed out after 2 seconds" in json.dumps(model.requests[1]["messages"])
    assert "Linux" in json.dumps(model.requests[2]["messages"][-1])
    (kept,) = (own.trials / result.trial_id).rglob("mini-swe-agent.trajectory.json")
    assert kept.parent.name == "agent" and "answer.txt" in kept.read_text()


def test_terminus_works_in_tmux_of_the_container(server: Server) -> None:
    model = ScriptedModel([typed("echo 42 > /app/answer.txt"), FINISHED, FINISHED])
    try:
        result = server.run("answer", "terminus-2", base_url=model.url)
    finally:
        model.close()
    assert result.reward == 1.0, result.verdict
    assert result.agent_metrics.turns == 3


@pytest.mark.parametrize("agent", ["mini-swe-agent", "terminus-2"])
def test_nothing_of_an_agent_out_of_time_is_beside_the_verifier(server: Server, agent: str) -> None:
    make_task(
        server.tasks, "hasty", dockerfile=DOCKERFILE, test=LISTED, toml=TOML + HEALTH, agent_s=8.0
    )
    last = f"{DAEMON.format('left')} sleep 600"
    is_mini = agent == "mini-swe-agent"
    script = [bash(FORGER), bash(last)] if is_mini else [typed(FORGER), typed(last, 60.0)]
    model = ScriptedModel(script)
    try:
        result = server.run("hasty", agent, base_url=model.url)
    finally:
        model.close()
    assert result.verdict.cause is Cause.AGENT_TIMEOUT, result.verdict
    listed = last_output(server)
    assert "reward.txt" not in listed and "name=left" not in listed, listed
    assert "sleep 600" not in listed and "tmux" not in listed, listed
    assert "name=started" in listed and result.reward == 0.0, listed


@pytest.mark.parametrize("way", ["files", "links", "folders"])
def test_what_an_agent_put_where_the_verifier_works_is_gone(server: Server, way: str) -> None:
    result = server.run("answer", "probe", forge=way)
    assert result.reward == 0.0, result.verdict
    assert (result.agent_metrics.probe or {})["forged"] > 0


def test_what_went_wrong_with_a_container_is_no_grade(
    server: Server, variables: dict[str, str]
) -> None:
    make_task(server.tasks, "broken", dockerfile=DOCKERFILE + "RUN echo no; exit 3\n")
    broken = server.run("broken", "nop").verdict
    assert broken.cause is Cause.SANDBOX_FAILED and 'STEP "RUN echo no; exit 3"' in broken.detail
    someone = TOML.replace("[agent]", '[agent]\nuser = "someone"')
    make_task(server.tasks, "someone", dockerfile=DOCKERFILE, toml=someone)
    missing = server.run("someone").verdict
    assert missing.cause is Cause.SANDBOX_FAILED and "someone" in missing.detail, missing
    model = ScriptedModel([bash("echo begun; sleep 300"), bash(DONE)])
    end = threading.Thread(target=end_container, args=(model, variables))
    end.start()
    try:
        ended = server.run("answer", "mini-swe-agent", base_url=model.url).verdict
    finally:
        model.close()
        end.join()
    assert ended.cause is Cause.SANDBOX_FAILED and "the container has ended" in ended.detail


def end_container(model: ScriptedModel, variables: dict[str, str]) -> None:
    until(lambda: model.requests)
    time.sleep(1)
    podman(variables, "kill", *podman(variables, "ps", "--quiet").stdout.split())


def test_a_server_that_an_agent_leaves_is_its_work(server: Server) -> None:
    make_task(server.tasks, "serve", dockerfile=DOCKERFILE, test=LISTED)
    model = ScriptedModel([bash(DAEMON.format("served")), bash("echo more")])
    try:
        result = server.run("serve", "mini-swe-agent", base_url=model.url, max_turns=2)
    finally:
        model.close()
    assert result.verdict.cause is Cause.TURN_LIMIT, result.verdict
    assert "name=served" in last_output(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_sandbox_outlives_its_server(
    variables: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """At once when it is stopped; when it is killed, the next one finds them."""
    working, building = (f"sleep {random.randint(10**6, 10**8)}" for _ in range(2))
    make_task(tmp_path / "tasks", "long", dockerfile=DOCKERFILE, solve=working, agent_s=500)
    make_task(tmp_path / "tasks", "build", dockerfile=f"{DOCKERFILE}RUN {building}\n")
    server = Server(tmp_path, tmp_path / "tasks", "--sandbox", "podman")
    assert server.process is not None
    try:
        for task in ("long", "build"):
            begin(server, task)
        until(lambda: "-long" in str(left(variables)) and running(working))
        until(lambda: running(building))
        server.stop(number)
        if number is signal.SIGKILL:
            assert "-long" in str(left(variables)["containers"])
            listed = sweep(server, "dry-run")
            assert " long " in listed and " build " in listed and "nothing was" in listed
            assert "-long" in str(left(variables)["containers"])
            server.start()
            assert "of an earlier server" in (tmp_path / "server.log").read_text()
        assert left(variables, owner_of(server.trials)) == {}
        assert not running(working) and not running(building)
        assert list((server.trials / environments.SCRATCH).iterdir()) == []
    finally:
        if server.process.poll() is None:
            server.stop()
        assert "miles-" not in sweep(server, "now")


def begin(server: Server, task: str) -> None:
    """Start a trial that is named like its task."""
    request = TrialRequest(instance_id=task, agent_name="oracle", lease_s=600)
    server.call(lambda client: client.start(task, request))


def sweep(server: Server, how: str) -> str:
    command = [sys.executable, "-m", "miles_core.agent_server.main", "--sweep", how]
    done = subprocess.run(
        [*command, "--trials-dir", str(server.trials)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def running(command: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return any(line.endswith(command) and "-c" not in line for line in listed.stdout.splitlines())
