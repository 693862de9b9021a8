"""The push to real engine processes, by each transport, while engines fail and come back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from push_helpers import Engines, Trainer, log_probs, make_model, status

from miles_core.cluster.services import ServiceError
from miles_core.errors import UserError

TRANSPORTS = ("shm", "disk", "broadcast")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture
def trainer(hf: Path) -> Iterator[Trainer]:
    trainer = Trainer(hf)
    yield trainer
    trainer.worker.close()


async def assert_served(engines: Engines, trainer: Trainer, version: int, count: int) -> None:
    """So many engines are routed to, and all of them have the trainer's log-probabilities."""
    urls, routed = engines.routed[-1]
    assert routed == version and len(urls) == count
    expected = trainer.log_probs()
    for url in urls:
        found, served = await log_probs(url)
        assert served == str(version)
        assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_engines_serve_what_the_trainer_has(
    hf: Path, trainer: Trainer, tmp_path: Path, transport: str
) -> None:
    async with Engines(tmp_path, hf, trainer, 1, transport) as engines:
        (member,) = engines.pool.members
        assert await status(member.url) == 503  # nothing to serve before the first push
        for version in (1, 2):
            report = await engines.watched(engines.weights.push(version))
            assert report.transport == transport and report.engines == 1
            assert report.bytes >= 4 * 2 * 96 * 48
            await assert_served(engines, trainer, version, 1)
            trainer.change()
        # A push that ends midway: the engine goes on with the weights that it had.
        before = await log_probs(member.url)

        def stop(action: str, args: tuple[Any, ...]) -> None:
            if action in ("share", "broadcast") and args[0] == 2 or action == "write":
                raise RuntimeError("the trainer ended")

        trainer.before = stop
        with pytest.raises(RuntimeError, match="the trainer ended"):
            await engines.watched(engines.weights.push(3))
        assert await log_probs(member.url) == before
        assert before[1] == "2" and not engines.alarms
        trainer.before = lambda action, args: None
        await engines.watched(engines.weights.push(3))
        await assert_served(engines, trainer, 3, 1)


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
async def test_an_engine_that_is_killed_midway_comes_back(
    hf: Path, trainer: Trainer, tmp_path: Path, transport: str
) -> None:
    async with Engines(tmp_path, hf, trainer, 2, transport) as engines:
        await engines.watched(engines.weights.push(1))
        await assert_served(engines, trainer, 1, 2)
        trainer.change()
        calls = {"shm": "share", "broadcast": "broadcast"}

        def kill(action: str, args: tuple[Any, ...]) -> None:
            if action == calls[transport] and args[0] == 2:
                trainer.before = lambda action, args: None
                engines.send(1)

        trainer.before = kill
        report = await engines.watched(engines.weights.push(2))
        assert report.engines == 1
        await assert_served(engines, trainer, 2, 1)
        assert [kind for kind, _ in engines.alarms] == ["engine_out"]
        await engines.until_current(2)
        await assert_served(engines, trainer, 2, 2)
        assert [kind for kind, _ in engines.alarms] == ["engine_out", "engine_back"]
        # No list that sessions were given ever held an engine without the current weights.
        assert [len(urls) for urls, version in engines.routed if version == 2] == [0, 1, 2]


async def test_an_engine_that_refuses_a_bucket_is_restarted(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engines(tmp_path, hf, trainer, 2, "shm") as engines:
        await engines.watched(engines.weights.push(1))
        trainer.change()
        first, second = engines.pool.members
        client, pid = second.client, engines.pid(1)
        assert client is not None
        take, count = client.take, 0

        async def spoil(payload: str) -> None:
            nonlocal count
            count += 1
            await take(payload if count != 2 else payload[:-8])

        monkeypatch.setattr(client, "take", spoil)
        await engines.watched(engines.weights.push(2))
        await assert_served(engines, trainer, 2, 1)
        assert engines.routed[-1][0] == [first.url]
        ((kind, detail),) = engines.alarms
        assert kind == "engine_out" and "the payload cannot be read" in detail
        await engines.until_current(2)
        assert engines.pid(1) != pid
        await assert_served(engines, trainer, 2, 2)


async def test_other_weights_than_were_sent_are_found(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served is read back, so a fault after the arrival shows too."""
    async with Engines(tmp_path, hf, trainer, 1, "shm") as engines:
        (member,) = engines.pool.members
        client = member.client
        assert client is not None
        end = client.end

        async def end_and_damage(*args: Any) -> None:
            await end(*args)
            other = make_model(tmp_path / "other", seed=5)
            await client.load(other, 1)

        monkeypatch.setattr(client, "end", end_and_damage)
        await engines.watched(engines.weights.push(1))
        ((kind, detail), _) = engines.alarms
        assert kind == "engine_out" and "digest" in detail
        await assert_served(engines, trainer, 1, 1)


async def test_only_what_can_change_is_sent_again(
    hf: Path, trainer: Trainer, tmp_path: Path
) -> None:
    model = trainer.worker.policy.model
    frozen = ("embedding", "layers.0", "linear_fc2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    async with Engines(tmp_path, hf, trainer, 2, "shm") as engines:
        whole = await engines.watched(engines.weights.push(1))
        trainer.change(*frozen)
        part = await engines.watched(engines.weights.push(2))
        assert 0 < part.bytes < whole.bytes / 2
        await assert_served(engines, trainer, 2, 2)
        # After a restart an engine has nothing to which a part could be added.
        engines.send(0)
        trainer.change(*frozen)
        await engines.watched(engines.weights.push(3))
        await engines.until_current(2)
        await assert_served(engines, trainer, 3, 2)
        assert await engines.watched(engines.weights.push(4)) and engines.routed[-1][1] == 4
        await assert_served(engines, trainer, 4, 2)


async def test_engines_with_bfloat16_are_sent_bfloat16(
    hf: Path, trainer: Trainer, tmp_path: Path
) -> None:
    flags = ("--dtype", "bfloat16")
    async with Engines(tmp_path, hf, trainer, 1, "shm", flags=flags) as engines:
        report = await engines.watched(engines.weights.push(1))
        stream = trainer.worker.push_weights("begin")
        trainer.worker.push_weights("end")
        assert report.bytes * 2 == stream["total"]
        urls, _ = engines.routed[-1]
        found, _ = await log_probs(urls[0])
        assert found == pytest.approx(trainer.log_probs(), abs=0.15)


async def test_a_run_without_any_engine_ends(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_core.cluster.engine_pool.MOST_RESTARTS", 0)
    async with Engines(tmp_path, hf, trainer, 1, "shm") as engines:
        await engines.watched(engines.weights.push(1))
        engines.send(0)
        with pytest.raises(ServiceError, match="no engine is left"):
            await engines.watched(asyncio.sleep(60))


async def test_shared_memory_without_room_is_told(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_core.training.weight_sender.room", lambda: 5)
    async with Engines(tmp_path, hf, trainer, 1, "shm") as engines:
        with pytest.raises(UserError, match="5 bytes free"):
            await engines.watched(engines.weights.push(1))
    async with Engines(tmp_path, hf, trainer, 1, "auto") as engines:
        assert (await engines.watched(engines.weights.push(1))).transport == "disk"


async def test_a_stopped_engine_does_not_hold_up_the_others(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_core.cluster.engine_pool.LOAD_S", 3.0)
    async with Engines(tmp_path, hf, trainer, 2, "shm") as engines:
        for member in engines.pool.members:
            assert member.client is not None
            member.client.timeout_s = 3.0
        await engines.watched(engines.weights.push(1))
        trainer.change()
        engines.send(0, signal.SIGSTOP)
        await engines.watched(engines.weights.push(2))
        await assert_served(engines, trainer, 2, 1)
