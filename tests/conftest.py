"""Fixtures that tests of several parts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.config.schema import MilesConfig


@pytest.fixture
def small_config(tmp_path: Path) -> MilesConfig:
    """A valid configuration of three steps whose paths lie under the test's folder."""
    return MilesConfig.model_validate(
        {
            "data": {"prompt_data": tmp_path / "rows.jsonl"},
            "model": {"hf_checkpoint": tmp_path / "hf"},
            "rollout": {
                "num_rollout": 3,
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                "max_seq_len": 512,
                "rollout_max_response_len": 64,
            },
            "agent_server": {"tasks_dir": tmp_path / "tasks"},
            "training": {"global_batch_size": 4, "max_tokens_per_gpu": 1024},
        }
    )
