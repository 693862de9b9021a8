"""A trainer in this process, real engine processes, and the push between them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from miles_core.cluster.engine_pool import EnginePool
from miles_core.cluster.services import Service
from miles_core.cluster.weight_push import PushSettings, WeightPush
from miles_core.training.config import TrainerConfig
from miles_core.training.worker import TrainerWorker

PROMPT = list(range(20, 60))


def make_model(directory: Path, seed: int = 0, tied: bool = False) -> Path:
    """A random Qwen3 of two layers."""
    torch.manual_seed(seed)
    config = tf.Qwen3Config(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = tf.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    vocabulary = {f"t{i}": i for i in range(96)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


class Trainer:
    """A worker of one rank, called as the ranks' actors are."""

    def __init__(self, hf: Path, **changes: Any) -> None:
        settings: dict[str, Any] = {"update_weight_buffer_size": 20_000, "kl_loss_coef": 0.0}
        self.worker = TrainerWorker(TrainerConfig(**settings | changes))
        self.worker.init_from_hf(str(hf))
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda action, args: None
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        action, *rest = args
        self.calls.append(action)
        self.before(action, tuple(rest))
        return await asyncio.to_thread(getattr(self.worker, method), action, *rest)

    @torch.no_grad()
    def change(self, *but: str) -> None:
        """Change every parameter, save those in whose names one of these stands."""
        for name, parameter in self.worker.policy.model.named_parameters():
            if not any(part in name for part in but):
                parameter.mul_(1.1)

    def log_probs(self) -> list[float]:
        return self.worker.log_probs(PROMPT)[1:].tolist()


class Engines:
    """A pool of embedded engines, what it was told, and the push to it."""

    def __init__(
        self, folder: Path, hf: Path, trainer: Trainer, count: int, transport: str, *flags: str
    ) -> None:
        argv = ["miles_core.engines.server", "--model", str(hf), "--port", "0"]
        argv += ["--load-format", "dummy", "--seed", "3", *flags]
        env = {"OMP_NUM_THREADS": "1"}
        services = [Service(f"engine-{i}", list(argv), folder, env) for i in range(count)]
        self.folder = folder
        self.alarms: list[tuple[str, str]] = []
        self.routed: list[tuple[list[str], int]] = []
        self.pool = EnginePool(services, [], lambda *alarm: self.alarms.append(alarm), self._route)
        self._trainer = trainer
        self.use(transport)

    def use(self, transport: str) -> None:
        """Push by this transport from now on."""
        settings = PushSettings(
            transport, True, lambda version: self.folder / "weights" / f"v{version}"
        )
        self.weights = WeightPush(self.pool, self._trainer, settings)

    async def _route(self, urls: list[str], version: int) -> None:
        self.routed.append((urls, version))

    async def __aenter__(self) -> Engines:
        self.pool.start()
        try:
            await self.pool.wait()
        except BaseException:
            self.pool.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pool.stop()

    def pid(self, number: int) -> int:
        return int(json.loads((self.folder / f"engine-{number}.json").read_text())["pid"])

    def send(self, number: int, what: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(number), what)

    async def watched(self, work: Any) -> Any:
        """Wait for `work` while the pool is watched, as an attempt does."""

        async def watch() -> None:
            while True:
                await self.pool.check()
                await asyncio.sleep(0.1)

        task, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
        try:
            await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return await task
        finally:
            task.cancel()
            watching.cancel()
            await asyncio.gather(task, watching, return_exceptions=True)

    async def until_current(self, count: int, timeout_s: float = 120) -> None:
        """Repair until so many engines serve the current weights."""

        async def wait() -> None:
            repairs = asyncio.ensure_future(self.weights.keep_current())
            try:
                while len(self.pool.current()) < count or any(m.out for m in self.pool.current()):
                    assert not repairs.done(), repairs.result()
                    await asyncio.sleep(0.05)
            finally:
                repairs.cancel()
                await asyncio.gather(repairs, return_exceptions=True)

        async with asyncio.timeout(timeout_s):
            await self.watched(wait())


async def log_probs(url: str, prompt: list[int] = PROMPT) -> tuple[list[float], str]:
    """What an engine says of the prompt's tokens, and under which version."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        meta = (
            (await http.post(f"{url}/generate", json=body)).raise_for_status().json()["meta_info"]
        )
    return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta["weight_version"]


async def status(url: str, prompt: list[int] = PROMPT) -> int:
    """The status that a generation answers with."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return (await http.post(f"{url}/generate", json=body)).status_code
