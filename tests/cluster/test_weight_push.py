"""The push to real engine processes, by each transport, while engines fail and come back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from push_helpers import Engines, Trainer, log_probs, make_model, status

from miles_core.cluster.engine_pool import Member
from miles_core.cluster.services import ServiceError
from miles_core.cluster.transports import Target, pick
from miles_core.engines.weight_client import WeightClient
from miles_core.errors import UserError


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


async def test_engines_serve_what_the_trainer_has(
    hf: Path, trainer: Trainer, tmp_path: Path
) -> None:
    async with Engines(tmp_path, hf, trainer, 1, "shm") as engines:
        (member,) = engines.pool.members
        assert await status(member.url) == 503  # nothing to serve before the first push
        for number, transport in enumerate(("shm", "disk", "broadcast")):
            engines.use(transport)
            for version in (3 * number + 1, 3 * number + 2):
                report = await engines.watched(engines.weights.push(version))
                assert report.transport == transport and report.engines == 1
                assert report.bytes >= 4 * 2 * 96 * 48
                await assert_served(engines, trainer, version, 1)
                trainer.change()
            await _a_push_that_ends_midway_changes_nothing(engines, trainer, 3 * number + 3)


async def _a_push_that_ends_midway_changes_nothing(
    engines: Engines, trainer: Trainer, version: int
) -> None:
    (member,) = engines.pool.members
    before = await log_probs(member.url)

    def stop(action: str, args: tuple[Any, ...]) -> None:
        if (action in ("share", "broadcast") and args[0] == 2) or action == "write":
            raise RuntimeError("the trainer ended")

    trainer.before = stop
    with pytest.raises(RuntimeError, match="the trainer ended"):
        await engines.watched(engines.weights.push(version))
    trainer.before = lambda action, args: None
    assert await log_probs(member.url) == before
    assert before[1] == str(version - 1) and not engines.alarms
    await engines.watched(engines.weights.push(version))
    await assert_served(engines, trainer, version, 1)


async def test_an_engine_that_fails_midway_comes_back(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engines(tmp_path, hf, trainer, 2, "shm") as engines:
        await engines.watched(engines.weights.push(1))
        await assert_served(engines, trainer, 1, 2)
        trainer.change()
        _kill_at(engines, trainer, "share")
        assert (await engines.watched(engines.weights.push(2))).engines == 1
        await assert_served(engines, trainer, 2, 1)
        assert [kind for kind, _ in engines.alarms] == ["engine_out"]
        await engines.until_current(2)
        await assert_served(engines, trainer, 2, 2)
        assert [kind for kind, _ in engines.alarms] == ["engine_out", "engine_back"]
        # No list that sessions were given ever held an engine without the current weights.
        assert [len(urls) for urls, version in engines.routed if version == 2] == [0, 1, 2]
        await _one_that_refuses_a_bucket(engines, trainer, monkeypatch)


def _kill_at(engines: Engines, trainer: Trainer, wanted: str) -> None:
    """Kill the second engine before the third bucket is sent."""

    def kill(action: str, args: tuple[Any, ...]) -> None:
        if action == wanted and args[0] == 2:
            trainer.before = lambda action, args: None
            engines.send(1)

    trainer.before = kill


async def _one_that_refuses_a_bucket(
    engines: Engines, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engines.pool.members
    client, pid = second.client, engines.pid(1)
    assert client is not None
    take, count = client.take, 0

    async def spoil(payload: str) -> None:
        nonlocal count
        count += 1
        await take(payload if count != 2 else payload[:-8])

    monkeypatch.setattr(client, "take", spoil)
    trainer.change()
    await engines.watched(engines.weights.push(3))
    await assert_served(engines, trainer, 3, 1)
    assert engines.routed[-1][0] == [first.url]
    kind, detail = engines.alarms[-1]
    assert kind == "engine_out" and "the payload cannot be read" in detail
    await engines.until_current(2)
    assert engines.pid(1) != pid
    await assert_served(engines, trainer, 3, 2)


@pytest.mark.slow
async def test_a_broadcast_survives_an_engine_that_is_killed(
    hf: Path, trainer: Trainer, tmp_path: Path
) -> None:
    async with Engines(tmp_path, hf, trainer, 2, "broadcast") as engines:
        await engines.watched(engines.weights.push(1))
        trainer.change()
        _kill_at(engines, trainer, "broadcast")
        assert (await engines.watched(engines.weights.push(2))).engines == 1
        await assert_served(engines, trainer, 2, 1)
        await engines.until_current(2)
        await assert_served(engines, trainer, 2, 2)
        # The engine that lived is not blamed for the broadcast that broke.
        assert [detail.partition(":")[0] for _, detail in engines.alarms][:1] == ["engine-1"]
        assert [kind for kind, _ in engines.alarms] == ["engine_out", "engine_back"]


async def test_other_weights_than_were_sent_are_found(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served is read back, so a fault after the arrival shows too."""
    monkeypatch.setattr("miles_core.cluster.engine_pool.MOST_RESTARTS", 0)
    async with Engines(tmp_path, hf, trainer, 1, "shm") as engines:
        (member,) = engines.pool.members
        client = member.client
        assert client is not None
        end = client.end

        async def end_and_damage(*args: Any) -> None:
            await end(*args)
            await client.load(make_model(tmp_path / "other", seed=5), 1)

        monkeypatch.setattr(client, "end", end_and_damage)
        with pytest.raises(ServiceError, match="no engine is left"):
            await engines.watched(engines.weights.push(1))
        ((kind, detail),) = engines.alarms
        assert kind == "engine_out" and "digest" in detail
        assert engines.routed == [([], 1)]


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


async def test_bfloat16_engines_are_sent_bfloat16_and_the_last_one_ends_the_run(
    hf: Path, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_core.cluster.engine_pool.MOST_RESTARTS", 0)
    async with Engines(tmp_path, hf, trainer, 1, "shm", "--dtype", "bfloat16") as engines:
        report = await engines.watched(engines.weights.push(1))
        stream = trainer.worker.push_weights("begin")
        trainer.worker.push_weights("end")
        assert report.bytes * 2 == stream["total"]
        urls, _ = engines.routed[-1]
        found, _ = await log_probs(urls[0])
        assert found == pytest.approx(trainer.log_probs(), abs=0.15)
        engines.send(0)
        with pytest.raises(ServiceError, match="no engine is left"):
            await engines.watched(asyncio.sleep(60))


def test_shared_memory_that_cannot_be_is_told() -> None:
    here = {"machine": "this", "room": 10, "largest": 10}
    far = Target(Member("far", client=WeightClient("http://10.0.0.7:1", 1)), None)  # type: ignore[arg-type]
    assert pick("auto", here, "this", []) == pick("shm", here, "this", []) == "shm"
    for machine, targets, said in (
        ({**here, "room": 9}, [], "9 bytes free"),
        ({**here, "machine": "other"}, [], "another machine"),
        (here, [far], "far is not known"),
    ):
        assert pick("auto", machine, "this", targets) == "disk"
        assert pick("broadcast", machine, "this", targets) == "broadcast"
        with pytest.raises(UserError, match=said):
            pick("shm", machine, "this", targets)


@pytest.mark.slow
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
