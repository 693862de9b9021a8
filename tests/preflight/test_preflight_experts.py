"""Preflight of models with experts: who must be able to read them, and who tells of the routing."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from miles_core.config.load import ConfigError, load_config
from miles_core.config.schema import MilesConfig
from miles_core.preflight.checks import check_paths, check_services

GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}
REPLAY = {"use_rollout_routing_replay": "true"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "tasks").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GLM))
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    (model / "model.safetensors").write_bytes(weights)
    return tmp_path


def config(folder: Path, **flags: str) -> MilesConfig:
    base = {
        "prompt_data": str(folder / "rows.jsonl"),
        "hf_checkpoint": str(folder / "model"),
        "tasks_dir": str(folder / "tasks"),
        "num_rollout": "1",
        "max_seq_len": "8192",
    }
    return load_config(None, {**base, **flags}, {}).config


@contextmanager
def engine(meta: dict[str, Any]) -> Iterator[str]:
    """A loopback engine whose answers have this meta_info; it wants to be asked for experts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["return_routed_experts"] is True
            self._answer({"output_ids": [1], "meta_info": meta})

        def _answer(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

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


def rows(count: int, layers: int) -> dict[str, Any]:
    return {"routed_experts": base64.b64encode(bytes(count * layers * 2 * 4)).decode()}


def test_the_embedded_engine_must_serve_the_model_and_another_need_not(folder: Path) -> None:
    (problem,) = check_paths(config(folder))
    assert problem.field == "model.hf_checkpoint"
    assert "the embedded engine does not serve this model" in problem.problem
    assert "Glm4MoeForCausalLM" in problem.problem and "--engine-urls" in problem.problem
    assert check_paths(config(folder, engine_urls="http://127.0.0.1:1")) == []


def test_what_the_trainer_cannot_read_is_refused_whoever_serves_it(folder: Path) -> None:
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(GLM | {"n_group": 2}))
    (problem,) = check_paths(config(folder, engine_urls="http://127.0.0.1:1"))
    assert problem.field == "model.hf_checkpoint" and "n_group" in problem.problem
    assert str(file) in problem.problem


@pytest.mark.parametrize("flag", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_dense_model_has_no_routing(folder: Path, flag: str) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(GLM | {"first_k_dense_replace": 3}))
    dense = config(folder, engine_urls="http://127.0.0.1:1", **{flag: "true"})
    (problem,) = check_paths(dense)
    assert problem.field == f"training.{flag}" and "has no experts" in problem.problem
    with pytest.raises(ConfigError, match=f"training.{flag}: the model of a recipe"):
        load_config(
            None,
            {
                "prompt_data": "rows.jsonl",
                "tasks_dir": "tasks",
                "num_rollout": "1",
                "model_recipe": "tiny.toml",
                flag: "true",
            },
            {},
        )


@pytest.mark.parametrize("layers", [2, 3])
def test_an_engine_that_tells_the_experts_is_sound(folder: Path, layers: int) -> None:
    with engine(rows(3, layers)) as url:
        sound = config(folder, engine_urls=url, **REPLAY)
        assert check_paths(sound) == []
        assert asyncio.run(check_services(sound)) == []


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({}, "does not tell"),
        ({"routed_experts": None}, "does not tell"),
        ({"routed_experts": "%"}, "does not tell"),
        (rows(3, 4), "96 bytes of routed experts for 3 tokens"),
        (rows(4, 3), "rows of 16 or 24"),
    ],
)
def test_an_engine_that_does_not_is_found_before_the_run(
    folder: Path, meta: dict[str, Any], text: str
) -> None:
    with engine(meta) as url:
        assert asyncio.run(check_services(config(folder, engine_urls=url))) == []
        (problem,) = asyncio.run(check_services(config(folder, engine_urls=url, **REPLAY)))
    assert problem.field == "training.use_rollout_routing_replay"
    assert text in problem.problem and "--enable-return-routed-experts" in problem.fix
