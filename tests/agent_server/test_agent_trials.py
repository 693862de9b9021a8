"""Trials from request to verdict, on a real server with real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, ScriptedModel, bash, error, text  # noqa: E402
from agent_server_helpers import CHECK, TOML, Server, make_task  # noqa: E402

from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

MINI = "mini-swe-agent"


def run_mini(server: Server, script: list, task: str = "answer", **fields):
    """A mini-swe-agent trial against a script; the result and the model."""
    model = ScriptedModel(script)
    try:
        return server.run(task, MINI, base_url=model.url, **fields), model
    finally:
        model.close()


def test_oracle_solves_and_nop_does_not(server: Server) -> None:
    solved, idle = server.run("answer", "oracle"), server.run("answer", "nop")
    assert (solved.reward, solved.verdict.kind) == (1.0, VerdictKind.GRADED)
    assert (idle.reward, idle.verdict.kind) == (0.0, VerdictKind.GRADED)
    assert solved.eval_report == {"reward": 1.0}
    assert solved.agent_metrics.total_time > 0


def test_mini_swe_agent_solves(server: Server) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 77}
    script = [bash("ls"), bash("echo 42 > answer.txt"), bash(DONE)]
    result, model = run_mini(server, script, sampling_params=sampling)
    assert result.reward == 1.0 and result.verdict.cause is None
    assert result.exit_status == "Submitted" and result.agent_metrics.turns == 3
    first, last = model.requests[0], model.requests[-1]
    assert {key: first[key] for key in sampling} == sampling
    assert first["model"] == "policy" and first["tools"][0]["function"]["name"] == "bash"
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"].strip() == "Write 42 into /app/answer.txt"
    assert [m["role"] for m in last["messages"][2:]] == ["assistant", "tool"] * 2


def test_each_turn_only_appends(server: Server) -> None:
    """Also after an answer without a tool call, which is kept: a token-exact session needs it."""
    script = [text("thinking"), bash("true"), bash(DONE)]
    result, model = run_mini(server, script)
    assert result.agent_metrics.turns == 3
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    assert model.requests[1]["messages"][2] == {"role": "assistant", "content": "thinking"}


@pytest.mark.parametrize(
    ("refusal", "cause", "status"),
    [
        (error(400, "context_length_exceeded"), Cause.TOKEN_BUDGET, "SequenceLengthLimitExceeded"),
        (error(400, "turn_limit"), Cause.TURN_LIMIT, "LimitsExceeded"),
    ],
)
def test_policy_limits_are_graded(server: Server, refusal, cause: Cause, status: str) -> None:
    result, _ = run_mini(server, [bash("echo 42 > answer.txt"), refusal])
    assert (result.verdict.kind, result.reward) == (VerdictKind.GRADED, 1.0)
    assert result.verdict.cause is cause and result.exit_status == status


def test_max_turns_and_malformed_actions_are_graded(server: Server) -> None:
    limited, model = run_mini(server, [bash("true")], max_turns=2)
    assert limited.verdict.cause is Cause.TURN_LIMIT and len(model.requests) == 2
    assert limited.reward == 0.0
    malformed, _ = run_mini(server, [text("no tool")])
    assert malformed.verdict.cause is Cause.MALFORMED_ACTIONS
    assert malformed.verdict.kind is VerdictKind.GRADED


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ([bash("true"), error(502, "engine_failed")], Cause.ENGINE_FAILED),
        ([bash("true"), error(404, "unknown_session")], Cause.SESSION_FAILED),
        ([error(400, "context_length_exceeded")], Cause.NO_MODEL_CALL),
    ],
)
def test_faults_of_the_world_are_no_verdict(server: Server, script: list, cause: Cause) -> None:
    result, _ = run_mini(server, script)
    assert result.verdict.kind is VerdictKind.NO_VERDICT and result.reward is None
    assert result.verdict.cause is cause, result.verdict


def test_agent_timeout_is_graded_and_its_commands_end(server: Server, tasks: Path) -> None:
    """What the agent runs when its time is up is gone before the verifier looks."""
    check = "#!/bin/bash\nsleep 1; cat /app/ticks | wc -l > /tmp/a; sleep 1\n"
    check += "if [ $(cat /app/ticks | wc -l) = $(cat /tmp/a) ]; then r=1; else r=0; fi\n"
    check += "echo $r > /logs/verifier/reward.txt\n"
    make_task(tasks, "slow-agent", test=check, agent_s=4)
    loop = "while true; do echo x >> /app/ticks; sleep 0.1; done"
    result, _ = run_mini(server, [bash(loop)], "slow-agent")
    assert result.verdict.cause is Cause.AGENT_TIMEOUT, result.verdict
    assert (result.verdict.kind, result.reward) == (VerdictKind.GRADED, 1.0)
    assert result.exit_status == "TimeLimitExceeded"


REWARDS = {
    "no-file": ("true", Cause.REWARD_MISSING),
    "nan": ("echo nan > /logs/verifier/reward.txt", Cause.REWARD_INVALID),
    "inf-json": ("echo '{\"reward\": 1e999}' > /logs/verifier/reward.json", Cause.REWARD_INVALID),
    "words": ("echo passed > /logs/verifier/reward.txt", Cause.REWARD_INVALID),
    "empty": (": > /logs/verifier/reward.txt", Cause.REWARD_INVALID),
    "two-keys": ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', Cause.REWARD_INVALID),
    "list": ("echo '[1]' > /logs/verifier/reward.json", Cause.REWARD_INVALID),
    "slow": ("sleep 30; echo 1 > /logs/verifier/reward.txt", Cause.VERIFIER_TIMEOUT),
}


@pytest.mark.parametrize("kind", sorted(REWARDS))
def test_no_reward_is_made_up(server: Server, tasks: Path, kind: str) -> None:
    script, cause = REWARDS[kind]
    make_task(tasks, f"reward-{kind}", test=f"#!/bin/bash\n{script}\n", verifier_s=2)
    result = server.run(f"reward-{kind}", "oracle")
    assert result.reward is None and result.verdict.cause is cause, result.verdict


def test_named_reward_is_chosen(server: Server, tasks: Path) -> None:
    script = '#!/bin/bash\necho \'{"style": 0.1, "reward": 0.7}\' > /logs/verifier/reward.json\n'
    make_task(tasks, "named", test=script)
    result = server.run("named", "nop")
    assert result.reward == 0.7 and result.eval_report == {"style": 0.1, "reward": 0.7}


def test_run_that_fails_names_its_line(server: Server, tasks: Path) -> None:
    make_task(tasks, "run-fails", dockerfile="FROM debian:12\n\nRUN true && \\\n  false\n")
    detail = server.run("run-fails", "oracle").verdict.detail
    assert "line 3" in detail and "RUN true" in detail


@pytest.mark.parametrize("name", ["../answer", "..", "/etc", "absent", ".hidden", "a/b", "%2e%2e"])
def test_ids_that_name_no_task(server: Server, name: str) -> None:
    result = server.run(name)
    assert result.verdict.cause is Cause.TASK_NOT_FOUND and result.reward is None


def test_link_out_of_the_tasks_directory_is_refused(
    server: Server, tasks: Path, tmp_path: Path
) -> None:
    make_task(tmp_path, "elsewhere")
    (tasks / "linked").symlink_to(tmp_path / "elsewhere")
    assert server.run("linked").verdict.cause is Cause.TASK_NOT_FOUND


def test_dockerfile_is_followed(server: Server, tasks: Path) -> None:
    dockerfile = (
        'FROM debian:12 AS base\nARG NAME=World\nENV GREETING="Hello $NAME" OTHER=2\n'
        "WORKDIR /srv/x\n"
        'RUN ["sh", "-c", "echo $GREETING > made"]\nCOPY data /srv/data/\nCOPY one.txt ./\n'
        'USER root\nCMD ["x"]\n'
    )
    test = CHECK.replace(
        '"$(cat /app/answer.txt 2>/dev/null)" = "42"',
        '"$(cat made /srv/data/f one.txt)$OTHER" = "$(printf \'Hello World\\nF\\n12\')"',
    )
    toml = TOML.replace('workdir = "/app"\n', "")
    task = make_task(tasks, "dockerfile", dockerfile=dockerfile, test=test, toml=toml)
    (task / "environment" / "data").mkdir()
    (task / "environment" / "data" / "f").write_text("F\n")
    (task / "environment" / "one.txt").write_text("1\n")
    result = server.run("dockerfile", "nop")
    assert result.reward == 1.0, result.verdict


def test_secret_of_the_session_is_in_no_file(server: Server) -> None:
    result, _ = run_mini(server, [bash("true"), bash(DONE)])
    for path in (server.trials / result.trial_id).rglob("*"):
        if path.is_file():
            assert b"secret-of-the-session" not in path.read_bytes(), path
    kept = json.loads((server.trials / result.trial_id / "result.json").read_text())
    assert kept == result.model_dump(mode="json")
