"""What a trainer rank needs to know; plain values, so that a driver without torch can build it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_core.config.lora import LoraSettings, lora_settings
from miles_core.config.schema import TrainingConfig


@dataclass(frozen=True)
class TrainerConfig:
    """Algorithm, optimizer and layout. Names are those of `TrainingConfig`, which explains them.

    `temperature` is the one that the engine samples with: log-probabilities on both sides are
    those of logits / temperature.
    """

    seed: int = 0
    temperature: float = 1.0
    global_batch_size: int = 32
    lr: float = 1e-6
    lr_warmup_steps: int = 0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    clip_grad: float = 1.0
    optimizer_cpu_offload: bool = False
    advantage_estimator: Literal[
        "grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    grpo_std_normalization: bool = True
    gamma: float = 1.0
    lambd: float = 1.0
    normalize_advantages: bool = True
    value_clip: float = 0.2
    critic_lr: float | None = None
    critic_lr_warmup_steps: int = 0
    num_critic_only_steps: int = 0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    kl_loss_coef: float = 0.01
    kl_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    loss_aggregation: Literal["trajectory", "token", "constant"] = "trajectory"
    loss_constant_length: int | None = None
    use_rollout_logprobs: bool = False
    use_tis: bool = False
    tis_mode: Literal["tis", "mis", "icepop"] = "tis"
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    use_routing_replay: bool = False
    use_rollout_routing_replay: bool = False
    lora_rank: int | None = None
    lora_alpha: float | None = None
    target_modules: tuple[str, ...] = ()
    max_tokens_per_gpu: int = 16384
    micro_batch_size: int | None = None
    packing: bool = True
    recompute: bool = False
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_nonfinite_steps: int = 3
    update_weight_buffer_size: int = 512 * 2**20

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the reward has a KL to the reference."""
        return self.kl_loss_coef > 0 or self.kl_coef > 0

    @property
    def replays_routing(self) -> bool:
        """Whether tokens of the policy are sent to experts that were recorded before."""
        return self.use_routing_replay or self.use_rollout_routing_replay

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters that are trained, or None when all weights are."""
        return lora_settings(self.lora_rank, self.lora_alpha, self.target_modules, self.seed)


def trainer_config(training: TrainingConfig, seed: int, temperature: float) -> TrainerConfig:
    """The trainer's configuration from the sections of a run's."""
    values = training.model_dump(
        exclude={
            "num_trainer_ranks",
            "trainer_threads",
            "train_dtype",
            "update_weight_transport",
            "check_weight_update_equal",
        }
    )
    values["target_modules"] = tuple(training.target_modules)
    return TrainerConfig(
        seed=seed,
        temperature=temperature,
        threads=training.trainer_threads,
        dtype=training.train_dtype,
        **values,
    )
