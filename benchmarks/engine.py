"""Tokens per second of the embedded engine over HTTP, beside a bare loop on the same machine.

Makes a small random model, starts the real server, and drives it with an async client in this
process: `python benchmarks/engine.py [--json]`. A figure is output tokens of all requests
divided by the wall time from the first request's start to the last answer.

The speed of a shared machine changes from minute to minute, so each round is followed by one of
`StaticLoop`, with the same model, threads, prompts and outputs in this process; a result's `ratio`
is the median over rounds of the engine's figure divided by the loop's of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.nn.functional as F

VOCAB = 4096
# Figures of an idle machine where the static loop makes 209, 565 and 744 tokens per second.
TARGETS = {1: 150, 8: 450, 32: 600}
TARGET_RATIOS = {1: 150 / 209, 8: 450 / 565, 32: 600 / 744}


def make_model(directory: Path) -> None:
    """A random Qwen3: 4 layers x 256, 8 heads and 4 key heads of 32, vocabulary 4096."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


class StaticLoop:
    """The same model in plain torch: prompts of one length, prefilled as one batch, then decoded
    in lockstep, greedily. No HTTP, no scheduler, no sampling, no log-probabilities."""

    def __init__(self, directory: Path) -> None:
        from transformers import Qwen3ForCausalLM

        self.model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config: Any = self.model.config
        self.config = config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.layers = []
        for layer in self.model.model.layers:
            a, m = layer.self_attn, layer.mlp
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
            self.layers.append((layer, qkv, torch.cat([m.gate_proj.weight, m.up_proj.weight])))

    def _norm(self, x: torch.Tensor, module: Any) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), module.weight, self.config.rms_norm_eps)

    def forward(self, ids: torch.Tensor, start: int, cache: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocab] after `ids` [batch, new], which stand at `start` and after.

        `cache` is [layers, 2, batch, kv_heads, length, head_dim].
        """
        batch, new = ids.shape
        end = start + new
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        cos, sin = self.model.model.rotary_emb(x, torch.arange(start, end).unsqueeze(0))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        for (layer, qkv, gate_up), (keys, values) in zip(self.layers, cache, strict=True):
            h = F.linear(self._norm(x, layer.input_layernorm), qkv)
            h = h.view(batch, new, self.heads + 2 * self.kv_heads, -1)
            q, k, v = h.split([self.heads, self.kv_heads, self.kv_heads], 2)
            q = self._norm(q, layer.self_attn.q_norm).transpose(1, 2)
            k = self._norm(k, layer.self_attn.k_norm).transpose(1, 2)
            q, k = (
                y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin
                for y in (q, k)
            )
            keys[:, :, start:end], values[:, :, start:end] = k, v.transpose(1, 2)
            k, v = keys[:, :, :end], values[:, :, :end]
            if new == 1:  # the query heads of a key head become rows, so no key is repeated
                a = F.scaled_dot_product_attention(
                    q.view(batch, self.kv_heads, -1, q.shape[-1]), k, v
                )
            else:
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                a = a.transpose(1, 2)
            x = x + F.linear(a.reshape(batch, new, -1), layer.self_attn.o_proj.weight)
            h = F.linear(self._norm(x, layer.post_attention_layernorm), gate_up)
            gate, up = h.chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
        return F.linear(self._norm(x[:, -1], self.model.model.norm), self.model.lm_head.weight)

    @torch.inference_mode()
    def generate(self, prompts: torch.Tensor, output: int) -> torch.Tensor:
        """Greedy continuation [batch, output] of `prompts` [batch, tokens]."""
        batch, length = prompts.shape
        size = (len(self.layers), 2, batch, self.kv_heads, length + output, self.config.head_dim)
        cache = torch.empty(size)
        tokens = [self.forward(prompts, 0, cache).argmax(-1, keepdim=True)]
        for position in range(length, length + output - 1):
            tokens.append(self.forward(tokens[-1], position, cache).argmax(-1, keepdim=True))
        return torch.cat(tokens, 1)

    def rate(self, concurrency: int, prompt: int, output: int) -> float:
        """Tokens per second of one batch."""
        prompts = torch.tensor([random_ids(prompt) for _ in range(concurrency)])
        started = time.perf_counter()
        self.generate(prompts, output).tolist()
        return concurrency * output / (time.perf_counter() - started)


def random_ids(count: int) -> list[int]:
    """A prompt."""
    return [random.randrange(3, VOCAB) for _ in range(count)]


async def rate_http(
    client: httpx.AsyncClient, url: str, concurrency: int, prompt: int, output: int
) -> float:
    """Tokens per second of one round; every request has a prompt of its own."""

    async def one(ids: list[int]) -> None:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": output, "ignore_eos": True},
            "return_logprob": True,
        }
        answer = (await client.post(f"{url}/generate", json=body)).raise_for_status().json()
        if len(answer["output_ids"]) != output:
            raise RuntimeError(f"{len(answer['output_ids'])} tokens instead of {output}")

    prompts = [random_ids(prompt) for _ in range(concurrency)]
    started = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    return concurrency * output / (time.perf_counter() - started)


async def measure(url: str, loop: StaticLoop, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of the engine and of the static loop in turn, at every concurrency."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(args.concurrency))
    results = []
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        for concurrency in args.concurrency:
            engine, static = [], []
            for _ in range(args.repeats + 1):
                load = (concurrency, args.prompt, args.output)
                engine.append(await rate_http(client, url, *load))
                static.append(loop.rate(*load))
            del engine[0], static[0]  # warm-up
            ratios = [ours / bare for ours, bare in zip(engine, static, strict=True)]
            target = TARGET_RATIOS.get(concurrency)
            results.append(
                {
                    "concurrency": concurrency,
                    **spread(engine, 1),
                    "target": TARGETS.get(concurrency),
                    "static_loop": spread(static, 1),
                    "ratio": spread(ratios, 3),
                    "target_ratio": target and round(target, 3),
                }
            )
    return results


def spread(values: list[float], digits: int) -> dict[str, float]:
    """Least, median and greatest of some figures."""
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def wait_ready(path: Path, server: subprocess.Popen[bytes]) -> str:
    """URL of the server once it is ready."""
    deadline = time.monotonic() + 120
    while not path.exists():
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError("the server was not ready within 120 s")
        time.sleep(0.1)
    return str(json.loads(path.read_text())["url"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the server, measure every concurrency, stop the server."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model, ready = Path(folder, "model"), Path(folder, "ready.json")
        make_model(model)
        loop = StaticLoop(model)
        command = [sys.executable, "-m", "miles_core.engines.server", "--model", str(model)]
        command += ["--port", "0", "--ready-file", str(ready), "--threads", str(args.threads)]
        command += ["--parent-pid", str(os.getpid())]
        server = subprocess.Popen(command)
        try:
            results = asyncio.run(measure(wait_ready(ready, server), loop, args))
        finally:
            server.terminate()
            server.wait(30)
    return {
        "benchmark": "engine",
        "unit": "output tokens/s, wall",
        "model": "random Qwen3, 4 layers x 256, 8/4 heads of 32, vocabulary 4096, float32",
        "threads": args.threads,
        "prompt_tokens": args.prompt,
        "output_tokens": args.output,
        "repeats": args.repeats,
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of server and loop")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of a request")
    parser.add_argument("--output", type=int, default=32, help="generated tokens of a request")
    parser.add_argument(
        "--repeats", type=int, default=10, help="measured rounds; one more warms up"
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at once"
    )
    args = parser.parse_args()
    result = run(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['model']}; {result['threads']} thread(s); {result['unit']}")
    for row in result["results"]:
        bare, ratio = row["static_loop"], row["ratio"]
        print(
            f"  {row['concurrency']:>3} concurrent: {row['median']:8.1f}"
            f" ({row['min']:.1f} to {row['max']:.1f}, target {row['target']});"
            f" static loop {bare['median']:.1f} ({bare['min']:.1f} to {bare['max']:.1f});"
            f" ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f},"
            f" target {row['target_ratio']})"
        )


if __name__ == "__main__":
    main()
