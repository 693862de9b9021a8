"""Abort, pause, weight updates, records and the life of an engine's process."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from miles_core.engines.client import EngineClient, EngineError
from miles_core.serving import EXIT_BUSY

PROMPT = list(range(20, 40))
LONG = {"max_new_tokens": 450, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], records: Path) -> Any:
    return start_server("--record-dir", str(records), "--max-running-requests", "4")


@pytest.fixture
async def client(server: Any) -> AsyncIterator[EngineClient]:
    async with EngineClient([server.url]) as client:
        await client.wait_ready(30)
        yield client


async def info(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/server_info")).json()


async def until(url: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the server's state fulfils a condition."""
    for _ in range(1000):
        if condition(await info(url)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the state was not reached: {await info(url)}")


async def post(url: str, route: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(url + route, json=body)


async def update(client: EngineClient, directory: Path, version: int, mode: str = "abort") -> None:
    """Load a directory in a pause."""
    await client.pause(mode)
    try:
        await client.load(directory, version)
    finally:
        await client.resume()


async def test_abort_returns_what_there_is(server: Any, client: EngineClient) -> None:
    running = asyncio.create_task(client.generate(PROMPT, LONG, rid="to-abort"))
    other = asyncio.create_task(client.generate(PROMPT[:5], {**SHORT, "max_new_tokens": 100}))
    await until(server.url, lambda state: state["num_running_reqs"] >= 1)
    await post(server.url, "/abort_request", {"rid": "to-abort"})
    answer = await running
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) < 450
    assert (await other)["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_client_that_goes_away_frees_its_place(server: Any) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"input_ids": PROMPT, "sampling_params": LONG}
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{server.url}/generate", json=body, timeout=0.1)
    await until(server.url, lambda state: state["num_running_reqs"] == 0)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_holds_and_continue_goes_on(
    server: Any, client: EngineClient, mode: str
) -> None:
    wanted = {**LONG, "temperature": 0, "max_new_tokens": 300}
    whole = await client.generate(PROMPT, wanted)
    running = asyncio.create_task(client.generate(PROMPT, wanted))
    await until(server.url, lambda state: state["num_running_reqs"] == 1)
    await post(server.url, "/pause_generation", {"mode": mode})
    late = asyncio.create_task(client.generate(PROMPT, SHORT))
    done, _ = await asyncio.wait((running, late), timeout=0.3)
    assert not done and (await info(server.url))["paused"]
    await post(server.url, "/continue_generation", {})
    answer = await running
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")
    assert (await late)["output_ids"] == whole["output_ids"][:4]


async def test_pause_aborts_by_default(server: Any, client: EngineClient) -> None:
    running = asyncio.create_task(client.generate(PROMPT, LONG))
    await until(server.url, lambda state: state["num_running_reqs"] == 1)
    await post(server.url, "/pause_generation", {})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    await post(server.url, "/continue_generation", {})


async def test_an_update_under_load_gives_spans(
    server: Any, client: EngineClient, models: dict[str, Path]
) -> None:
    old = await client.generate(PROMPT, {**SHORT, "max_new_tokens": 20})
    version = await client.weight_version()
    running = asyncio.create_task(client.generate(PROMPT, LONG))
    await until(server.url, lambda state: state["num_running_reqs"] == 1)
    await update(client, models["newer"], version + 1, mode="in_place")
    meta = (await running)["meta_info"]
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == [str(version), str(version + 1)]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] > 0
    assert spans[1]["end"] == 450 and meta["weight_version"] == str(version + 1)
    # No key of the old weights may be shared with a request under the new ones.
    new = await client.generate(PROMPT, {**SHORT, "max_new_tokens": 20})
    assert new["meta_info"]["cached_tokens"] == 0
    assert new["output_ids"] != old["output_ids"]
    await update(client, models["qwen3"], version + 2)
    again = await client.generate(PROMPT, {**SHORT, "max_new_tokens": 20})
    assert again["output_ids"] == old["output_ids"]


def _broken(models: dict[str, Path], folder: Path, kind: str) -> Path:
    """A copy of the newer model with one fault."""
    target = folder / kind
    shutil.copytree(models["newer"], target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    elif kind == "missing":
        del tensors["model.layers.1.mlp.down_proj.weight"]
        save_file(tensors, file)
    else:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
        save_file(tensors, file)
    return target


@pytest.mark.parametrize("kind", ["truncated", "missing", "nan"])
async def test_a_failed_update_keeps_weights_and_continues(
    server: Any, client: EngineClient, models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    before = await client.generate(PROMPT, SHORT)
    version = await client.weight_version()
    with pytest.raises(EngineError, match="400"):
        await update(client, _broken(models, tmp_path, kind), version + 1)
    assert not (await info(server.url))["paused"]
    after = await client.generate(PROMPT, SHORT)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == str(version)


async def test_a_model_of_other_sizes_is_refused(
    client: EngineClient, models: dict[str, Path]
) -> None:
    with pytest.raises(EngineError, match="differ from the served model"):
        await update(client, models["llama"], 99)


async def test_no_token_inside_a_weight_window(server: Any, client: EngineClient) -> None:
    assert (await post(server.url, "/end_weight_update", {})).status_code == 200
    assert (await post(server.url, "/begin_weight_update", {})).json()["success"] is True
    assert (await post(server.url, "/begin_weight_update", {})).status_code == 400
    waiting = asyncio.create_task(client.generate(PROMPT, SHORT))
    done, _ = await asyncio.wait((waiting,), timeout=0.3)
    assert not done
    await post(server.url, "/end_weight_update", {})
    assert len((await waiting)["output_ids"]) == 4


async def test_reuse_changes_no_result(server: Any, client: EngineClient) -> None:
    first = await client.generate(PROMPT, {**SHORT, "max_new_tokens": 30})
    ids = PROMPT + first["output_ids"] + [7, 8, 9]
    reused = await client.generate(ids, {**SHORT, "max_new_tokens": 30})
    assert reused["meta_info"]["cached_tokens"] == len(PROMPT) + 30 - 1
    await post(server.url, "/flush_cache", {})
    fresh = await client.generate(ids, {**SHORT, "max_new_tokens": 30})
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] == reused["output_ids"]
    for a, b in zip(
        fresh["meta_info"]["output_token_logprobs"],
        reused["meta_info"]["output_token_logprobs"],
        strict=True,
    ):
        assert abs(a[0] - b[0]) < 2e-5


async def test_records_equal_the_answers(client: EngineClient, records: Path) -> None:
    answers = await asyncio.gather(
        *(client.generate([50 + i] * 5, {"max_new_tokens": 9}, rid=f"rec-{i}") for i in range(9))
    )
    (file,) = records.glob("generations-*.jsonl")
    lines = {line["rid"]: line for line in map(json.loads, file.read_text().splitlines())}
    for answer in answers:
        meta = answer["meta_info"]
        line = lines[meta["id"]]
        assert line["output_ids"] == answer["output_ids"] and line["input_len"] == 5
        assert line["output_logprobs"] == [e[0] for e in meta["output_token_logprobs"]]
        assert line["finish_reason"] == meta["finish_reason"]
        assert line["weight_version"] == int(meta["weight_version"])


async def test_versions_that_differ_are_an_error(
    server: Any, shared_server: Any, models: dict[str, Path]
) -> None:
    async with EngineClient([server.url, shared_server.url]) as both:
        await update(both, models["qwen3"], 500)
        assert await both.weight_version() == 500
        body = {"model_path": str(models["qwen3"]), "weight_version": "501"}
        await post(server.url, "/update_weights_from_disk", body)
        with pytest.raises(EngineError, match="different weight versions"):
            await both.weight_version()
        running = asyncio.create_task(both.generate(PROMPT, LONG, url=server.url))
        await until(server.url, lambda state: state["num_running_reqs"] == 1)
        await both.abort_all()
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_core.engines.server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_ends_at_once(models: dict[str, Path]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        result = _run("--model", str(models["qwen3"]), "--port", port)
    assert result.returncode == EXIT_BUSY
    assert f"port {port}" in result.stderr and "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_broken_model_directory_names_the_file(tmp_path: Path) -> None:
    result = _run("--model", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert "config.json" in result.stderr and "Traceback" not in result.stderr


def test_the_engine_ends_with_its_parent(start_server: Callable[..., Any]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server = start_server("--parent-pid", str(parent.pid))
    assert server.process.poll() is None
    parent.kill()
    parent.wait()
    assert server.process.wait(20) == 0


async def test_sigterm_ends_a_busy_engine_cleanly(start_server: Callable[..., Any]) -> None:
    server = start_server()
    async with EngineClient([server.url]) as client:
        running = asyncio.create_task(client.generate(PROMPT, LONG))
        await until(server.url, lambda state: state["num_running_reqs"] == 1)
        started = time.monotonic()
        server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, 20) == 0
        assert time.monotonic() - started < 20
        await asyncio.gather(running, return_exceptions=True)


def test_the_client_imports_no_torch() -> None:
    code = "import sys, miles_core.engines.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
