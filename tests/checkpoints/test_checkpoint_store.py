"""The newest complete checkpoint is found whatever a crash or a disk left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.checkpoints import store


def publish(root: Path, iteration: int, keep: int = 5) -> Path:
    directory = store.begin(root, iteration)
    (directory / "sub").mkdir()
    (directory / "weights.bin").write_bytes(bytes([iteration]) * 1000)
    (directory / "sub" / "part").write_text("part")
    return store.publish(directory, root, iteration, {"weight_version": iteration}, keep)


def test_the_newest_is_found_and_older_ones_are_dropped(tmp_path: Path) -> None:
    assert store.latest(tmp_path / "nothing") is None
    for iteration in (2, 4, 6, 8):
        publish(tmp_path, iteration, keep=2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["iter_0000006", "iter_0000008", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "8"
    newest = store.latest(tmp_path)
    assert newest is not None and newest.iteration == 8 and newest.passed_over == []
    assert newest.state == {"weight_version": 8, "iteration": 8}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def change(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "file", "says"),
    [
        (cut, "weights.bin", "500 bytes"),
        (change, "weights.bin", "changed"),
        (Path.unlink, "sub/part", "missing"),
        (Path.unlink, "MANIFEST.json", "MANIFEST.json"),
        (cut, "miles_state.json", None),
    ],
)
def test_a_damaged_one_is_passed_over_by_name(
    tmp_path: Path, damage, file: str, says: str | None
) -> None:
    publish(tmp_path, 1)
    broken = publish(tmp_path, 2)
    if says is None:
        damage, says = change, "changed"
    damage(broken / file)
    found = store.latest(tmp_path)
    assert found is not None and found.iteration == 1
    assert len(found.passed_over) == 1
    assert "iter_0000002" in found.passed_over[0] and says in found.passed_over[0]
    assert store.verify(broken) is not None and store.verify(found.path) is None


def test_publishing_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    change(publish(tmp_path, 1) / "weights.bin")
    publish(tmp_path, 1)
    found = store.latest(tmp_path)
    assert found is not None and found.iteration == 1
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


CRASH = """
import os, signal, sys
from pathlib import Path
from miles_core.checkpoints import manifest, store
root, where = Path(sys.argv[1]), sys.argv[2]
die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
directory = store.begin(root, 2)
(directory / "weights.bin").write_bytes(b"2" * 1000)
if where == "seal":
    manifest.seal = die
elif where == "rename":
    manifest.put_in_place = die
else:
    write = manifest.write_durably
    manifest.write_durably = lambda p, t: die() if p.name == store.TRACKER_FILE else write(p, t)
store.publish(directory, root, 2, {}, 5)
"""


@pytest.mark.parametrize(("where", "newest"), [("seal", 1), ("rename", 1), ("tracker", 2)])
def test_a_kill_while_publishing_leaves_a_loadable_checkpoint(
    tmp_path: Path, where: str, newest: int
) -> None:
    publish(tmp_path, 1)
    process = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), where], env=os.environ)
    assert process.returncode == -signal.SIGKILL
    found = store.latest(tmp_path)
    assert found is not None and found.iteration == newest and found.passed_over == []
    publish(tmp_path, 3)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    manifest = json.loads((tmp_path / "iter_0000003" / "MANIFEST.json").read_text())
    assert set(manifest["files"]) == {"weights.bin", "sub/part", "miles_state.json"}
