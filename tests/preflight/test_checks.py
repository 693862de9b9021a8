"""Preflight: every problem is found, names its key and says what to do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from miles_core.config.load import load_config
from miles_core.config.schema import MilesConfig
from miles_core.preflight import checks
from miles_core.preflight.checks import (
    PreflightError,
    check_agent_server,
    check_disk,
    check_local,
    check_paths,
    check_ports,
    check_programs,
    check_services,
    check_task_ids,
    local_tasks,
    require,
)

HEALTH = {
    "status": "ready",
    "instance_id": "i",
    "capacity": 4,
    "running": 0,
    "queued": 0,
    "sandbox": "bubblewrap",
    "limits": {},
    "harbor_version": "0.25.0",
    "agent_timeout_s": 60.0,
    "trial_timeout_s": 90.0,
    "tasks_dir": "/tasks",
    "tasks_found": 2,
    "agents": ["nop"],
}


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}


def write_model(directory: Path) -> None:
    """A Hugging Face directory as far as it can be judged without torch."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    (directory / "model.safetensors").write_bytes(weights)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    write_model(tmp_path / "model")
    (tmp_path / "tasks" / "write-001").mkdir(parents=True)
    return tmp_path


def config(folder: Path, **flags: str) -> MilesConfig:
    base = {
        "prompt_data": str(folder / "rows.jsonl"),
        "hf_checkpoint": str(folder / "model"),
        "tasks_dir": str(folder / "tasks"),
        "runs_dir": str(folder / "runs"),
        "num_rollout": "1",
        "max_seq_len": "8192",
        "agent_timeout": "60",
        "agent_trial_timeout": "120",
    }
    return load_config(None, {**base, **flags}, {}).config


def fields(problems: list[checks.Problem]) -> list[str]:
    assert all(problem.problem and problem.fix for problem in problems)
    return [problem.field for problem in problems]


@contextmanager
def serving(answers: dict[str, Any], token: str | None = None) -> Iterator[str]:
    """A loopback server with fixed JSON answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization")
            allowed = token is None or self.path == "/health" or given == f"Bearer {token}"
            status = 404 if self.path not in answers else 200 if allowed else 401
            error = {"error": {"code": "refused", "message": "no"}}
            body = json.dumps(answers[self.path] if status == 200 else error).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_sound_configuration_has_no_problem(folder: Path) -> None:
    sound = config(folder, sandbox="nop")
    assert check_local(sound) == []
    require([])


def test_all_wrong_paths_are_found(folder: Path) -> None:
    (folder / "file").write_text("")
    wrong = config(
        folder,
        prompt_data=str(folder / "no.jsonl"),
        hf_checkpoint=str(folder / "no-model"),
        tasks_dir=str(folder / "file"),
        agent_config=str(folder / "tasks"),
        ref_load=str(folder / "no-ref"),
    )
    problems = check_paths(wrong)
    assert fields(problems) == [
        "data.prompt_data",
        "model.hf_checkpoint",
        "model.ref_load",
        "agent_server.tasks_dir",
        "agent_server.agent_config",
    ]
    with pytest.raises(PreflightError) as error:
        require(problems)
    assert len(error.value.problems) == 5
    assert str(folder / "no.jsonl") in str(error.value)
    assert "--tasks-dir" in str(error.value)


def test_model_without_config_and_missing_recipe(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    assert fields(check_paths(config(folder))) == ["model.hf_checkpoint"]
    recipe = config(folder, hf_checkpoint="none", model_recipe=str(folder / "no.toml"))
    assert fields(check_paths(recipe)) == ["model.model_recipe"]


def test_tasks_dir_of_another_machine_is_not_looked_for(folder: Path) -> None:
    other = config(folder, tasks_dir="/elsewhere", agent_server_url="http://h:1")
    assert check_paths(other) == []


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", "{", "cannot be read"),
        ("config.json", json.dumps(MODEL | {"architectures": ["Foo"]}), "architectures"),
        ("config.json", json.dumps(MODEL | {"model_type": "mamba"}), "model_type 'mamba'"),
        ("config.json", json.dumps(MODEL | {"hidden_size": None}), "hidden_size"),
        ("tokenizer.json", None, "does not exist"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("model.safetensors", None, "holds no .safetensors file"),
        ("model.safetensors", "", "cut off"),
        ("model.safetensors", "version https://git-lfs", "cut off"),
        ("model.safetensors.index.json", '{"weight_map": {"x": "a.safetensors"}}', "a.safetensors"),
        ("model.safetensors.index.json", "{}", "weight_map"),
    ],
)
def test_unusable_model_directory(folder: Path, name: str, content: str | None, fault: str) -> None:
    file = folder / "model" / name
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(content)
    problems = check_paths(config(folder))
    assert fields(problems) == ["model.hf_checkpoint"]
    assert fault in problems[0].problem
    assert str(folder / "model") in problems[0].problem


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role != 'assistant' or loop.index > messages | length - 2 %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_model_whose_conversations_nobody_can_write_is_found(folder: Path) -> None:
    template = folder / "model" / "chat_template.jinja"
    template.write_text(FORGETFUL)
    (problem,) = check_paths(config(folder))
    assert problem.field == "sessions.chat_family" and "no chat family fits" in problem.problem
    assert "--chat-family" in problem.fix
    assert check_paths(config(folder, chat_family="chatml")) == []
    (unknown,) = check_paths(config(folder, chat_family="qwen33"))
    assert unknown.field == "sessions.chat_family" and "qwen3" in unknown.fix
    (tokens,) = check_paths(config(folder, chat_family="glm45"))
    assert "[gMASK]" in tokens.problem
    template.unlink()
    assert check_paths(config(folder)) == []


def test_cut_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = check_paths(config(folder))
    assert "its header says" in problem.problem


def test_missing_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert fields(check_programs(config(folder))) == ["agent_server.sandbox"]
    assert "docker" in check_programs(config(folder, sandbox="docker"))[0].problem
    assert check_programs(config(folder, agent_server_url="http://h:1")) == []
    wrong = config(folder, sandbox="nop", agent_python=str(folder / "python"))
    assert fields(check_programs(wrong)) == ["agent_server.agent_python"]


def test_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        problems = check_ports(config(folder, session_server_port=str(port)))
        assert fields(problems) == ["sessions.session_server_port"]
        assert f"port {port}" in problems[0].problem
        second = config(folder, session_server_port=str(port - 1), session_server_workers="2")
        assert f"port {port}" in check_ports(second)[0].problem
    assert check_ports(config(folder, session_server_port=str(free_port()))) == []


def test_wrong_address_and_port_range(folder: Path) -> None:
    wrong = config(folder, miles_host_ip="203.0.113.7")
    assert fields(check_ports(wrong)) == ["sessions.miles_host_ip"]
    wrong = config(folder, session_server_port="65535", session_server_workers="2")
    assert "beyond 65535" in check_ports(wrong)[0].problem


def test_full_disk_and_file_in_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    blocked = config(folder, runs_dir=str(folder / "file" / "runs"))
    assert fields(check_disk(blocked)) == ["run.runs_dir"]
    (nowhere,) = check_disk(config(folder, runs_dir="/proc/nowhere"))
    assert "cannot be written" in nowhere.problem
    monkeypatch.setattr(checks, "LEAST_FREE_BYTES", 1 << 62)
    assert fields(check_disk(config(folder, save_dir=str(folder / "s")))) == [
        "run.runs_dir",
        "run.save_dir",
    ]


def test_room_for_checkpoints_grows_with_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(folder / "model" / "model.safetensors", "wb") as file:
        file.truncate(1 << 20)
    assert check_disk(config(folder)) == []
    monkeypatch.setattr(checks, "CHECKPOINT_GROWTH", 1 << 40)
    problem = check_disk(config(folder))[0]
    assert problem.field == "run.runs_dir"
    assert "--keep-checkpoints" in problem.fix


def test_unknown_task_ids(folder: Path) -> None:
    assert local_tasks(folder / "tasks") == {"write-001"}
    assert check_task_ids(["write-001"], ["write-001", "other"], "T") == []
    wanted = ["write-001", "wirte-001", *(f"zz{i}" for i in range(20))]
    (problem,) = check_task_ids(wanted, ["write-001"], "T")
    assert "21 task ids" in problem.problem
    assert "wirte-001 (did you mean write-001?)" in problem.problem
    assert "and 11 more" in problem.problem


async def test_agent_server_that_fits(folder: Path) -> None:
    with serving({"/health": HEALTH, "/tasks": {"tasks": ["a", "b"]}}) as url:
        report = await check_agent_server(
            config(folder, max_concurrent_trials="9"), url, None, ["a"]
        )
    assert report.problems == []
    assert report.health is not None and report.health.capacity == 4
    assert len(report.warnings) == 1 and "capacity" in report.warnings[0]


@pytest.mark.parametrize(
    ("change", "flags", "field"),
    [
        ({"status": "starting"}, {}, "agent_server.agent_server_url"),
        ({"capacity": 0}, {}, "agent_server.agent_server_url"),
        ({"agent_timeout_s": 90.0}, {}, "agent_server.agent_timeout"),
        ({"trial_timeout_s": 120.0}, {}, "agent_server.agent_trial_timeout"),
        ({}, {"agent_trial_timeout": "80"}, "agent_server.agent_trial_timeout"),
    ],
)
async def test_agent_server_that_does_not_fit(
    folder: Path, change: dict[str, Any], flags: dict[str, str], field: str
) -> None:
    with serving({"/health": {**HEALTH, **change}, "/tasks": {"tasks": ["a"]}}) as url:
        report = await check_agent_server(config(folder, **flags), url, None, ["a"])
    assert fields(report.problems) == [field]


async def test_agent_server_without_a_task(folder: Path) -> None:
    with serving({"/health": HEALTH, "/tasks": {"tasks": ["a"]}}) as url:
        report = await check_agent_server(config(folder), url, None, ["a", "fix-git"])
    assert fields(report.problems) == ["data.prompt_data"]
    assert "fix-git" in report.problems[0].problem


async def test_agent_server_that_is_down_or_refuses(folder: Path) -> None:
    report = await check_agent_server(
        config(folder), f"http://127.0.0.1:{free_port()}", None, ["a"]
    )
    assert fields(report.problems) == ["agent_server.agent_server_url"]
    assert report.health is None
    with serving({"/health": HEALTH, "/tasks": {"tasks": ["a"]}}, token="right") as url:
        report = await check_agent_server(config(folder), url, "wrong", ["a"])
        assert "HARBOR_ADMIN_SECRET" in report.problems[0].fix
        assert (await check_agent_server(config(folder), url, "right", ["a"])).problems == []
    with serving({}) as url:
        report = await check_agent_server(config(folder), url, None, ["a"])
        assert fields(report.problems) == ["agent_server.agent_server_url"]


async def test_engines_and_ray(folder: Path) -> None:
    with serving({"/health": {}}) as url:
        dead = f"http://127.0.0.1:{free_port()}"
        some = config(folder, engine_urls=f"{url},{dead}", ray_address=url)
        problems = await check_services(some)
    assert fields(problems) == ["engine.engine_urls", "cluster.ray_address"]
    assert dead in problems[0].problem
    assert "404" in problems[1].problem
    assert await check_services(config(folder)) == []


def test_an_adapter_of_a_layer_that_the_model_does_not_have(folder: Path) -> None:
    lora = {"lora_rank": "4", "lr": "1e-5", "sandbox": "nop"}
    assert check_local(config(folder, **lora, target_modules="q_proj,up_proj")) == []
    (problem,) = check_local(config(folder, **lora, target_modules="q_proj,kv_b_proj"))
    assert problem.field == "training.target_modules" and "kv_b_proj" in problem.problem
