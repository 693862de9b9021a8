"""Tokens per second of the embedded engine over HTTP.

Makes a small random model, starts the real server, and drives it with an async client in this
process: `python benchmarks/engine.py [--json]`. A figure is output tokens of all requests
divided by the wall time from the first request's start to the last answer.
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

VOCAB = 4096
TARGETS = {1: 150, 8: 450, 32: 600}


def make_model(directory: Path) -> None:
    """A random Qwen3: 4 layers x 256, 8 heads and 4 key heads of 32, vocabulary 4096."""
    import torch
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


async def measure(
    url: str, concurrency: int, prompt: int, output: int, repeats: int
) -> list[float]:
    """Tokens per second of each repeat; every request has a prompt of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    rates = []
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:

        async def one() -> None:
            body = {
                "input_ids": [random.randrange(3, VOCAB) for _ in range(prompt)],
                "sampling_params": {"max_new_tokens": output, "ignore_eos": True},
                "return_logprob": True,
            }
            answer = (await client.post(f"{url}/generate", json=body)).raise_for_status().json()
            if len(answer["output_ids"]) != output:
                raise RuntimeError(f"{len(answer['output_ids'])} tokens instead of {output}")

        await asyncio.gather(*(one() for _ in range(concurrency)))
        for _ in range(repeats):
            started = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(concurrency)))
            rates.append(concurrency * output / (time.perf_counter() - started))
    return rates


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
    with tempfile.TemporaryDirectory() as folder:
        model, ready = Path(folder, "model"), Path(folder, "ready.json")
        make_model(model)
        command = [sys.executable, "-m", "miles_core.engines.server", "--model", str(model)]
        command += ["--port", "0", "--ready-file", str(ready), "--threads", str(args.threads)]
        command += ["--parent-pid", str(os.getpid())]
        server = subprocess.Popen(command)
        try:
            url = wait_ready(ready, server)
            results = []
            for concurrency in args.concurrency:
                rates = asyncio.run(
                    measure(url, concurrency, args.prompt, args.output, args.repeats)
                )
                results.append(
                    {
                        "concurrency": concurrency,
                        "min": round(min(rates), 1),
                        "median": round(statistics.median(rates), 1),
                        "max": round(max(rates), 1),
                        "target": TARGETS.get(concurrency),
                    }
                )
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
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the server")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of a request")
    parser.add_argument("--output", type=int, default=32, help="generated tokens of a request")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds; one more warms up")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at once"
    )
    result = run(parser.parse_args())
    if "--json" in sys.argv:
        print(json.dumps(result))
        return
    print(f"{result['model']}; {result['threads']} thread(s); {result['unit']}")
    for row in result["results"]:
        print(
            f"  {row['concurrency']:>3} concurrent: {row['median']:8.1f}"
            f"  ({row['min']:.1f} to {row['max']:.1f}, target {row['target']})"
        )


if __name__ == "__main__":
    main()
