"""Sessions over the embedded engine with a small random model: the engine's record agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from session_helpers import BASH, Agent, make_tokenizer, session_server, until


def make_model(directory: Path) -> Path:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=420,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=2,
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return make_tokenizer(directory)


def streamed(agent: Agent, messages: list[Any]) -> dict[str, Any]:
    """An answer that was put together from a stream."""
    response = agent.ask(messages, tools=[BASH], stream=True)
    assert response.status_code == 200, response.text
    *events, done = [line for line in response.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    deltas = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in events]
    content = "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_samples_are_the_engines_own_record(tmp_path: Path, http: httpx.Client) -> None:
    model = make_model(tmp_path / "model")
    ready = tmp_path / "engine.json"
    records = tmp_path / "records"
    command = [sys.executable, "-m", "miles_core.engines.server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", "0", "--ready-file", str(ready)]
    command += ["--threads", "1", "--record-dir", str(records), "--seed", "1"]
    engine = subprocess.Popen(command)
    try:
        until(lambda: ready.exists() or engine.poll() is not None, 120)
        assert engine.poll() is None
        url = json.loads(ready.read_text())["url"]
        with session_server(model, url, tmp_path) as server:
            pinned = {"temperature": 0.8, "top_p": 1.0, "max_tokens": 12}
            agent = Agent(server, http, max_seq_len=1200, sampling_params=pinned)
            messages = [{"role": "user", "content": "hé"}]
            for turn in range(4):
                if turn % 2:
                    messages.append(streamed(agent, messages))
                else:
                    messages.append(agent.message(messages, tools=[BASH]))
                messages.append({"role": "tool", "content": f"result {turn}"})
            (sample,) = agent.samples()["samples"]
    finally:
        engine.terminate()
        engine.wait(30)
    lines = [line for path in records.glob("*.jsonl") for line in path.read_text().splitlines()]
    record = {entry["rid"]: entry for entry in map(json.loads, lines)}
    assert len(sample["turns"]) == 4
    for turn in sample["turns"]:
        span = slice(turn["start"], turn["end"])
        entry = record[turn["rid"]]
        assert entry["input_len"] == turn["start"]
        assert entry["output_ids"] == sample["tokens"][span]
        assert entry["output_logprobs"] == sample["logprobs"][span]
        assert int(entry["weight_version"]) == turn["weight_version"]
