"""Tiny models and real engine processes for the engine's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

VOCAB = 300
STOP_TEXT = "stop here"


def make_model(directory: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A random model of two layers with a byte-level tokenizer of one token for each byte."""
    import torch
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 299,
        "tie_word_embeddings": family == "qwen3",
        "initializer_range": 0.2,
    } | changes
    model: Any
    if family == "qwen3_moe":
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        experts |= {"norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3}
        model = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(head_dim=16, **sizes | experts | changes))
    elif family == "qwen3":
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(head_dim=16, **sizes))
    else:
        model = tf.LlamaForCausalLM(tf.LlamaConfig(rope_theta=50000.0, **sizes))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones otherwise, which would hide a misplaced norm
            parameter.data.uniform_(0.5, 1.5)
    shard = {"max_shard_size": "100KB"} if family == "llama" else {}
    model.save_pretrained(directory, **shard)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of `qwen3`, `llama`, and `newer`: the first with other weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_model(root / "qwen3"),
        "llama": make_model(root / "llama", "llama", 1),
        "newer": make_model(root / "newer", seed=2),
    }


class Server:
    """A real engine process."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.ready = folder / "ready.json"
        command = [sys.executable, "-m", "miles_core.engines.server", "--model", str(model)]
        command += ["--port", "0", "--ready-file", str(self.ready), "--threads", "1", *flags]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 120
            while not self.ready.exists():
                assert self.process.poll() is None, "the engine ended before it was ready"
                assert time.monotonic() < deadline, "the engine was not ready in time"
                time.sleep(0.05)
            self.url = str(json.loads(self.ready.read_text())["url"])
        except BaseException:
            self.stop()
            raise

    def stop(self) -> int:
        """End the process and return its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@pytest.fixture(scope="session")
def start_server(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts engines that end with the session."""
    started: list[Server] = []

    def start(*flags: str, model: str = "qwen3") -> Server:
        server = Server(tmp_path_factory.mktemp("server"), models[model], *flags)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., Server]) -> Server:
    """One engine for the tests that leave it as they found it."""
    return start_server()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, trust_env=False) as client:
        yield client
