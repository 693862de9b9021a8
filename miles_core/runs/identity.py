"""Whether a start is the same run: changed configuration and changed inputs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.config.schema import MilesConfig
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir

# How the trainer's work is cut and where it lies, which changes no result beyond rounding: a
# checkpoint of any layout resumes in any other.
CUTS = (
    "num_trainer_ranks",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "max_tokens_per_gpu",
    "micro_batch_size",
    "packing",
    "recompute",
    "optimizer_cpu_offload",
)

# What a resume may change: how the run is carried out and watched, not what it computes.
ALLOWED = frozenset(
    {
        "preset",
        "run.run_name",
        "run.runs_dir",
        "run.keep_dumps",
        "run.keep_checkpoints",
        "run.keep_trials",
        "model.cache_dir",
        "rollout.num_rollout",
        "rollout.max_concurrent_trials",
        "rollout.max_attempts",
        "rollout.max_no_verdict_share",
        "rollout.no_verdict_window",
        "rollout.on_outage",
        "rollout.outage_wait_s",
        "rollout.no_signal_steps",
        "data.eval_prompt_data",
        "rollout.eval_interval",
        "rollout.n_samples_per_eval_prompt",
        "agent_server.agent_server_url",
        "agent_server.task_check",
        "agent_server.agent_trial_timeout",
        "agent_server.max_concurrent",
        "agent_server.agent_python",
        "sessions.session_server_workers",
        "sessions.session_server_port",
        "sessions.session_server_external_host",
        "sessions.miles_host_ip",
        "engine.engine_urls",
        "engine.num_engines",
        "engine.engine_threads",
        "engine.max_running_requests",
        "engine.record_generations",
        *(f"training.{name}" for name in CUTS),
        "training.trainer_threads",
        "training.max_nonfinite_steps",
        "training.update_weight_buffer_size",
        "training.update_weight_transport",
        "training.check_weight_update_equal",
        "checkpoint.save_interval",
        "checkpoint.async_save",
        "cluster.ray_address",
        "cluster.stall_seconds",
        "cluster.first_step_grace_s",
        "cluster.rank_silence_s",
        "cluster.stop_wait_s",
        "cluster.max_run_attempts",
        "cluster.retry_delay_s",
        "tracking.wandb_mode",
        "tracking.wandb_project",
    }
)

# Inputs that are compared by content: where they lie may change.
_BY_CONTENT = frozenset(
    {"data.prompt_data", "model.hf_checkpoint", "model.model_recipe", "agent_server.tasks_dir"}
)


@dataclass(frozen=True)
class Change:
    """One key whose value differs; `refused` says why it may not, or is None."""

    key: str
    old: Any
    new: Any
    refused: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def _flat(config: MilesConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        section = getattr(config, name)
        if hasattr(type(section), "model_fields"):
            for key in type(section).model_fields:
                values[f"{name}.{key}"] = getattr(section, key)
        else:
            values[name] = section
    return {k: os.path.abspath(v) if isinstance(v, Path) else v for k, v in values.items()}


def changes(old: MilesConfig, new: MilesConfig) -> list[Change]:
    """The keys that differ between the configuration of a run and that of its resume.

    `num_rollout` may grow, not shrink. Inputs that are identified by their content (data, model,
    tasks) may be somewhere else; `refuse_other_run` compares their fingerprints.
    """
    found = []
    before, after = _flat(old), _flat(new)
    for key, old_value in before.items():
        new_value = after[key]
        if old_value == new_value:
            continue
        refused = None
        if key == "rollout.num_rollout":
            if new_value < old_value:
                refused = "a run may get more steps, not fewer"
        elif key not in ALLOWED and key not in _BY_CONTENT:
            refused = "it would make this another run"
        found.append(Change(key, old_value, new_value, refused))
    return found


def refuse_other_run(run: RunDir, new: MilesConfig, fingerprints: dict[str, str]) -> list[Change]:
    """The allowed changes of a resume; raises UserError that lists all that are refused.

    `fingerprints` are those of the inputs now; each is compared with `run.json`, and one that the
    run does not know is another input.
    """
    found = changes(run.load_config(), new)
    problems = [f"{change} ({change.refused})" for change in found if change.refused]
    known = run.identity()["fingerprints"]
    for name in sorted(known.keys() | fingerprints.keys()):
        if known.get(name) != fingerprints.get(name):
            problems.append(f"{name}: its content is not what the run was started with")
    if problems:
        raise UserError(
            f"{run.path} cannot go on with these changes:\n  - " + "\n  - ".join(problems),
            "Undo them to resume this run, or start another run with a new --run-name.",
        )
    return found
