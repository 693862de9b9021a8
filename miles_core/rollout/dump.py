"""`rollout_data/<step>.pt`: what a step is trained on."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path
from typing import Any

from miles_core.rollout.loop import Group
from miles_core.rollout.trajectory import Trajectory
from miles_core.runs.files import write_atomic

_EXPERT_BYTES = 4


class DamagedRollout(ValueError):
    """A dump that cannot be read."""


def write_rollout(
    path: Path, step: int, weight_version: int, rows: list[str], groups: list[Group]
) -> None:
    """Write the groups as tensors; see docs/contracts.md for the layout.

    `rows` are the task ids of all rows of the step, dropped groups included: a restart compares
    them with what it draws before it uses the dump.
    """
    import torch

    data = {
        "step": step,
        "weight_version": weight_version,
        "rows": rows,
        "groups": [
            {
                "group_id": group.group_id,
                "instance_id": group.instance_id,
                "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
            }
            for group in groups
        ],
    }
    buffer = io.BytesIO()
    torch.save(data, buffer)
    write_atomic(path, buffer.getvalue())


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    import torch

    return {
        "trial_id": trajectory.trial_id,
        "reward": trajectory.verdict.reward,
        "verdict": trajectory.verdict.model_dump(mode="json"),
        "samples": [
            {
                "tokens": torch.tensor(sample["tokens"], dtype=torch.int64),
                "loss_mask": torch.tensor(sample["loss_mask"], dtype=torch.uint8),
                "logprobs": torch.tensor(sample["logprobs"], dtype=torch.float32),
                "turns": sample["turns"],
                **_experts(sample, trajectory.trial_id),
            }
            for sample in trajectory.samples
        ],
    }


def _experts(sample: dict[str, Any], trial_id: str) -> dict[str, Any]:
    """`routed_experts` as int16 [T - 1, experts of a token in all layers], when there are any."""
    import torch

    encoded, rows = sample.get("routed_experts"), len(sample["tokens"]) - 1
    if encoded is None or rows == 0:
        return {}
    data = base64.b64decode(encoded)
    if len(data) % (rows * _EXPERT_BYTES):
        raise ValueError(f"routed_experts of {trial_id}: {len(data)} bytes for {rows} tokens")
    experts = torch.frombuffer(bytearray(data), dtype=torch.int32).view(rows, -1)
    narrow = experts.short()
    if not torch.equal(narrow.int(), experts):
        raise ValueError(f"routed_experts of {trial_id}: there is no expert {int(experts.max())}")
    return {"routed_experts": narrow}


def read_rollout(path: Path) -> dict[str, Any]:
    """The content of a dump. Raises DamagedRollout for a file that is not whole."""
    import torch

    try:
        damaged = zipfile.ZipFile(path).testzip()  # what is mapped is checked by nobody else
        if damaged is not None:
            raise ValueError(f"the digest of {damaged} is wrong")
        data: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        data["rows"], data["groups"]  # a dump has both
    except FileNotFoundError:
        raise
    except Exception as error:  # torch and pickle raise many kinds for a damaged file
        reason = str(error).strip().partition("\n")[0]
        raise DamagedRollout(f"{path} is damaged: {type(error).__name__}: {reason}") from error
    return data
