"""A run's training once more, from its rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_core.cluster.fleet import Inputs
from miles_core.runs.directory import RunDir
from miles_core.training.config import trainer_config
from miles_core.training.worker import TrainerWorker

ONE_RANK = {
    f"{kind}_parallel_size": 1
    for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
}


def trained_again(
    run: Path, steps: int, export: Path | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Metrics of a run's first steps when one process trains its rollouts without interruption."""
    directory = RunDir(run)
    config, inputs = directory.load_config(), Inputs.load(directory)
    critic = changes.pop("critic_load", config.model.critic_load)
    settings = trainer_config(config.training, config.run.seed, config.rollout.temperature)
    worker = TrainerWorker(replace(settings, **ONE_RANK, **changes))
    try:
        worker.init(inputs.torch_dist, inputs.ref_torch_dist, critic and str(critic))
        metrics = [worker.train(i, str(directory.rollout_path(i))) for i in range(steps)]
        if export is not None:
            worker.export_hf(str(export))
    finally:
        worker.close()
    return metrics
