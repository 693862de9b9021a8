from pathlib import Path

import pytest
import torch

from miles_core.rollout.dump import DamagedRollout, read_rollout, write_rollout


def test_a_dump_that_is_not_whole_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "3.pt"
    write_rollout(path, 3, 4, ["row"], [])
    assert read_rollout(path)["rows"] == ["row"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedRollout, match=r"3\.pt is damaged"):
        read_rollout(path)
    torch.save({"step": 3}, path)
    with pytest.raises(DamagedRollout, match="rows"):
        read_rollout(path)
    with pytest.raises(FileNotFoundError):
        read_rollout(tmp_path / "4.pt")
