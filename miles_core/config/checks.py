"""Rules between fields of the configuration; each message says which field to change and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.config.algorithm_checks import WITHOUT_GROUPS, algorithm_errors
from miles_core.config.layout import layout_error, tokens_needed
from miles_core.config.lora import lora_errors

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig


def cross_field_errors(config: MilesConfig) -> list[str]:
    """Every violated rule, as one line for a person."""
    errors = []
    rollout, training, server = config.rollout, config.training, config.agent_server
    if config.model.hf_checkpoint is None and config.model.model_recipe is None:
        errors.append(
            "model.hf_checkpoint: no policy is given; set --hf-checkpoint to a Hugging Face "
            "directory, or --model-recipe to a recipe of a small model"
        )
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(training, name) and config.model.hf_checkpoint is None:
            errors.append(
                f"training.{name}: the model of a recipe has no experts, so there is no routing to "
                "replay; leave it out, or set --hf-checkpoint to a model with experts"
            )
    if server.agent_timeout >= server.agent_trial_timeout:
        errors.append(
            f"agent_server.agent_trial_timeout: {server.agent_trial_timeout:g} s must be above "
            f"agent_timeout ({server.agent_timeout:g} s), or the client gives up while the "
            f"sandbox still runs; set --agent-trial-timeout {server.agent_timeout + 1800:g}"
        )
    if (config.data.eval_prompt_data is None) != (rollout.eval_interval is None):
        errors.append(
            "rollout.eval_interval: an evaluation needs both --eval-prompt-data and "
            "--eval-interval; set both or none"
        )
    if rollout.min_group_size > rollout.n_samples_per_prompt:
        errors.append(
            f"rollout.min_group_size: {rollout.min_group_size} is above n_samples_per_prompt "
            f"({rollout.n_samples_per_prompt}), so every group would be dropped; set "
            f"--min-group-size {rollout.n_samples_per_prompt}"
        )
    trajectories = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if trajectories % training.global_batch_size:
        errors.append(
            f"training.global_batch_size: {training.global_batch_size} does not divide the "
            f"{trajectories} trajectories of a step (rollout_batch_size x n_samples_per_prompt); "
            f"set --global-batch-size {trajectories}"
        )
    if rollout.rollout_max_response_len > rollout.max_seq_len:
        errors.append(
            f"rollout.rollout_max_response_len: {rollout.rollout_max_response_len} is above "
            f"max_seq_len ({rollout.max_seq_len})"
        )
    needed = tokens_needed(training, rollout.max_seq_len)
    if training.max_tokens_per_gpu < needed:
        errors.append(
            f"training.max_tokens_per_gpu: {training.max_tokens_per_gpu} cannot hold one "
            f"trajectory of max_seq_len ({rollout.max_seq_len}); set --max-tokens-per-gpu "
            f"{needed}"
        )
    fault = layout_error(training.num_trainer_ranks, training)
    if fault is not None:
        errors.append(f"training.num_trainer_ranks: {fault}")
    errors += _critic_errors(config)
    errors += lora_errors(config)
    return errors + algorithm_errors(training, rollout.n_samples_per_prompt)


def _critic_errors(config: MilesConfig) -> list[str]:
    """Rules of the critic, and of groups of one, that concern several sections."""
    errors = []
    rollout, training = config.rollout, config.training
    estimator = training.advantage_estimator
    if config.model.critic_load is not None and estimator != "ppo":
        errors.append(
            f"model.critic_load: {estimator} has no critic; leave it out or set "
            "--advantage-estimator ppo"
        )
    if training.num_critic_only_steps >= rollout.num_rollout and estimator == "ppo":
        errors.append(
            f"training.num_critic_only_steps: {training.num_critic_only_steps} leaves none of the "
            f"{rollout.num_rollout} steps (num_rollout) to the policy"
        )
    lonely = rollout.min_group_size == 1 < rollout.n_samples_per_prompt
    if lonely and estimator not in WITHOUT_GROUPS:
        errors.append(
            f"rollout.min_group_size: {estimator} compares the members of a group, and one alone "
            "teaches nothing; set --min-group-size 2"
        )
    return errors
