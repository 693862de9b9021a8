"""Any damage to any file of a checkpoint is noticed, and the one before it is used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_helpers import Crasher, effective

from miles_core.checkpoints import store
from miles_core.errors import UserError


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_with_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], None]] = [cut, empty, flip, Path.unlink, swap_with_a_folder]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_to_any_file_is_noticed_and_named(
    crasher: Crasher, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    source = crasher.work / "start" / "checkpoints"
    newest = source / "iter_0000002"
    files = [p.relative_to(newest) for p in newest.rglob("*") if p.is_file()]
    assert len(files) >= 9
    for file in files:
        root = tmp_path / "root"
        shutil.copytree(source, root)
        damage(root / newest.name / file)
        found = store.latest(root)
        assert found is not None and found.iteration == 1, file
        (said,) = found.passed_over
        assert newest.name in said and file.as_posix() in said
        shutil.rmtree(root)


def test_any_changed_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    for iteration in (1, 2):
        directory = store.begin(tmp_path, iteration)
        (directory / "weights.bin").write_bytes(b"1")
        store.publish(directory, tmp_path, iteration, {}, keep=2)
    path = tmp_path / "iter_0000002" / "MANIFEST.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        found = store.latest(tmp_path)
        assert found is not None and found.iteration == 1, (place, bytes(changed))


def test_a_damaged_tracker_changes_nothing(crasher: Crasher, tmp_path: Path) -> None:
    shutil.copytree(crasher.work / "start" / "checkpoints", tmp_path / "root")
    for content in (b"", b"1", b"\xff\xfe"):
        (tmp_path / "root" / "latest_checkpointed_iteration.txt").write_bytes(content)
        found = store.latest(tmp_path / "root")
        assert found is not None and found.iteration == 2


def test_without_a_whole_one_the_run_does_not_begin_anew_by_itself(
    crasher: Crasher, tmp_path: Path
) -> None:
    shutil.copytree(crasher.work / "start" / "checkpoints", tmp_path / "root")
    for path in (tmp_path / "root").glob("iter_*"):
        flip(path / "common.pt")
    with pytest.raises(UserError, match="common.pt was changed") as error:
        store.latest(tmp_path / "root")
    assert "iter_0000001" in error.value.message and "iter_0000002" in error.value.message


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    crasher: Crasher,
) -> None:
    root = crasher.copy("start", "damaged")
    flip(root / "iter_0000002" / "__0_1.distcp")
    crasher.run("damaged", until=8)
    log = crasher.log("damaged")
    (resumed,) = [entry for entry in log if "resumed" in entry]
    assert resumed["resumed"] == 1 and "__0_1.distcp was changed" in resumed["passed_over"][0]
    assert effective(log) == crasher.log("plain")[:8]
