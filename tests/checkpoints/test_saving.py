"""Saves of an attempt over a real rank: in the background, one at a time, and never silent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import CONFIG, make_hf, make_rollout

from miles_core.checkpoints import store
from miles_core.checkpoints.convert import convert_to_torch_dist
from miles_core.cluster.saving import Saver, resume_point
from miles_core.config.schema import MilesConfig
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir
from miles_core.runs.journal import Journal, read
from miles_core.training import save as training_save
from miles_core.training.errors import SaveError
from miles_core.training.worker import TrainerWorker


class OneRank:
    """The ranks of a run, of which there is one, in a thread of this process: as an actor does it,
    one call after the other."""

    def __init__(self, worker: TrainerWorker) -> None:
        self.worker, self.done = worker, []
        self._thread = ThreadPoolExecutor(1)

    async def answers(self, method: str, *args: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._thread, getattr(self.worker, method), *args)
        self.done.append(method)
        return [answer]

    async def call(self, method: str, *args: Any) -> Any:
        return (await self.answers(method, *args))[0]

    def close(self) -> None:
        self._thread.submit(self.worker.close).result()
        self._thread.shutdown()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("saving")
    convert_to_torch_dist(make_hf(work / "hf"), work / "base", check="tensors")
    return work / "base"


@pytest.fixture
def rank(base: Path) -> Iterator[OneRank]:
    worker = TrainerWorker(CONFIG)
    worker.init(str(base), str(base))
    rank = OneRank(worker)
    yield rank
    rank.close()


def saver_of(rank: OneRank, folder: Path, background: bool = True, published: int = 0) -> Saver:
    events = Journal(folder / "journal.jsonl")
    return Saver(rank, folder / "root", events, 2, background, published)  # type: ignore[arg-type]


def saved(folder: Path) -> list[tuple[int, bool]]:
    return [(e["iteration"], e["background"]) for e in read(folder / "journal.jsonl")]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that takes no more, as far as this process can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_what_is_trained_beside_a_save_is_not_in_it(
    rank: OneRank, base: Path, tmp_path: Path
) -> None:
    rollouts = [str(make_rollout(tmp_path / f"{i}.pt", step=i, seed=i)) for i in range(4)]
    saver = saver_of(rank, tmp_path)
    await rank.call("train", 0, rollouts[0])
    await saver.save({"iteration": 1})
    assert saver.published == 0 and "finish_save" not in rank.done
    trained = [await rank.call("train", 1, rollouts[1])]
    await saver.save({"iteration": 2})  # waits for the one before it
    assert saver.published == 1
    await saver.save({"iteration": 2})  # was begun
    trained.append(await rank.call("train", 2, rollouts[2]))
    await saver.settle()
    assert saved(tmp_path) == [(1, True), (2, True)]
    assert rank.done.count("start_save") == 2
    trained.append(await rank.call("train", 3, rollouts[3]))
    rank.worker.close()

    for start in (1, 2):
        again = TrainerWorker(CONFIG)
        again.init(str(tmp_path / "root" / f"iter_{start:07d}"), str(base))
        for step in range(start, 4):
            metrics = again.train(step, rollouts[step])
            for name in ("loss", "grad_norm", "lr", "kl_loss"):
                assert metrics[name] == trained[step - 1][name], (start, step, name)
        again.close()


@pytest.mark.parametrize("reason", ["memory", "setting"])
async def test_without_memory_for_a_copy_the_run_waits_for_the_save(
    rank: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "memory":
        monkeypatch.setattr(training_save, "available_memory", lambda: 1000)
    saver = saver_of(rank, tmp_path, background=reason == "memory")
    await saver.save({"iteration": 1})
    assert saver.published == 1 and saved(tmp_path) == [(1, False)]


@pytest.mark.parametrize("background", [True, False])
async def test_a_file_that_cannot_be_written_is_named_and_nothing_is_published(
    rank: OneRank, tmp_path: Path, background: bool
) -> None:
    saver = saver_of(rank, tmp_path, background)
    await saver.save({"iteration": 1})
    await saver.settle()
    with (
        files_of_at_most(4096),
        pytest.raises(SaveError, match=r"too large: '.*iter_0000002-\w+/__0_\d.distcp"),
    ):
        await saver.save({"iteration": 2})
        await saver.settle()
    assert saver.published == 1
    found = store.latest(tmp_path / "root")
    assert found is not None and found.iteration == 1 and found.passed_over == []
    assert not list((tmp_path / "root").glob(".*"))
    await saver.save({"iteration": 3})
    await saver.settle()
    assert saver.published == 3


async def test_an_attempt_that_ends_gives_its_save_time(rank: OneRank, tmp_path: Path) -> None:
    saver = saver_of(rank, tmp_path)
    await saver.save({"iteration": 1})
    await saver.leave()
    assert saver.published == 1 and saved(tmp_path) == [(1, True)]


def test_a_rank_does_not_train_over_what_is_being_written(
    rank: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = str(make_rollout(tmp_path / "0.pt"))
    assert not rank.worker.start_save(str(tmp_path / "out"), background=False)
    with pytest.raises(RuntimeError, match="in flight"):
        rank.worker.train(0, rollout)
    with pytest.raises(RuntimeError, match="in flight"):
        rank.worker.start_save(str(tmp_path / "out"), background=True)
    rank.worker.finish_save()
    rank.worker.train(0, rollout)


def make_run(tmp_path: Path, config: MilesConfig, *iterations: int) -> RunDir:
    run = RunDir.create(tmp_path / "run", config, {})
    with Journal(run.journal) as events:
        for iteration in iterations:
            directory = store.begin(run.checkpoints, iteration)
            path = store.publish(directory, run.checkpoints, iteration, {}, keep=5)
            events.append("checkpoint_saved", iteration=iteration, path=str(path), seconds=0.1)
    return run


def test_a_run_that_saved_does_not_begin_anew_where_its_checkpoints_vanished(
    tmp_path: Path, small_config: MilesConfig
) -> None:
    run = make_run(tmp_path, small_config, 2, 4)
    found = resume_point(run)
    assert found is not None and found.iteration == 4 and found.passed_over == []
    shutil.rmtree(run.checkpoints / "iter_0000004")
    found = resume_point(run)
    assert found is not None and found.iteration == 2
    assert found.passed_over == ["iter_0000004: it is missing"]
    shutil.rmtree(run.checkpoints)
    with pytest.raises(UserError, match="saved after 4 steps") as error:
        resume_point(run)
    assert str(run.checkpoints) in error.value.message and "iter_0000004" in error.value.fix


def test_a_run_that_has_not_saved_begins(tmp_path: Path, small_config: MilesConfig) -> None:
    assert resume_point(make_run(tmp_path, small_config)) is None


def test_digests_of_an_older_manifest_are_checked_too(
    tmp_path: Path, small_config: MilesConfig
) -> None:
    run = make_run(tmp_path, small_config, 2)
    path = run.checkpoints / "iter_0000002"
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        del entry["xxh3_128"]
        entry["sha256"] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert store.verify(path) is None
    (path / "miles_state.json").write_text('{"iteration": 3}'.ljust(17))
    assert "miles_state.json" in str(store.verify(path))
