"""The configuration of a run: one pydantic model per part, each field with its reason to exist.

Field names are unique over all sections, so that each has a flat flag of the same name
(`rollout.n_samples_per_prompt` is `--n-samples-per-prompt`). Names and defaults follow the
recipe where it has them. This module imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LARGEST_INTEGER = 2**53
"""The largest one up to which every reader of JSON is exact."""


class Section(BaseModel):
    """A part of the configuration; an unknown key is an error, and so is a number that a run's
    `config.json` could not hold."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_into_json(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise ValueError(f"must lie within +-{LARGEST_INTEGER}, is {value}")
        return value


class RunConfig(Section):
    """Where a run lives and what is kept of it."""

    run_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of the run and of its folder. Using it again resumes the run. "
        "Default: the preset and the time.",
    )
    runs_dir: Path = Field(Path("runs"), description="Folder that holds the runs")
    save_dir: Path | None = Field(None, description="Checkpoints; default RUN/checkpoints")
    save_traces_dir: Path | None = Field(
        None, description="Parent of rollout_data/ and train_data/; default RUN"
    )
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialisation")
    keep_dumps: int = Field(100, ge=1, description="Steps whose dumps are kept")
    keep_checkpoints: int = Field(3, ge=1, description="Checkpoints that are kept")
    keep_trials: int = Field(20, ge=1, description="Steps whose finished trials are kept")


class DataConfig(Section):
    """The prompt rows."""

    prompt_data: Path = Field(description="Rows: JSON lines or Parquet, converted or raw")
    prompt_key: str = Field("prompt", description="Dotted path of the prompt in a raw row")
    id_key: str = Field(
        "metadata.instance_id", description="Dotted path of the task id in a raw row"
    )
    agent_name: str = Field("mini-swe-agent", description="Agent of rows that name none")
    eval_prompt_data: Path | None = Field(
        None, description="Held-out rows, in any form that prompt_data may have"
    )
    shuffle: bool = Field(True, description="Draw rows in a random order, new in each epoch")


class ModelConfig(Section):
    """The policy that is trained and the reference that it is held to."""

    hf_checkpoint: Path | None = Field(
        None, description="Hugging Face directory of the policy; its tokenizer is used"
    )
    model_recipe: Path | None = Field(
        None,
        description="Recipe (TOML) of a small model that is made and warm-started when "
        "hf_checkpoint is not given",
    )
    ref_load: Path | None = Field(
        None, description="torch_dist directory of the reference; default: the converted policy"
    )
    critic_load: Path | None = Field(
        None,
        description="torch_dist directory that the critic starts from: its critic, or else its "
        "policy under a new value head; default: the converted policy",
    )
    cache_dir: Path | None = Field(
        None, description="Prepared data, models and conversions; default RUNS_DIR/.cache"
    )


class RolloutConfig(Section):
    """From prompts to trajectories."""

    num_rollout: int = Field(ge=1, description="Steps: one rollout and its update each")
    rollout_batch_size: int = Field(4, ge=1, description="Prompts (groups) in a step")
    n_samples_per_prompt: int = Field(8, ge=1, description="Trajectories of each prompt")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampling")
    rollout_max_response_len: int = Field(8192, ge=1, description="Tokens of one model call")
    max_seq_len: int = Field(16384, ge=8, description="Tokens of a whole trajectory")
    max_turns: int = Field(100, ge=1, description="Model calls of one trial")
    max_concurrent_trials: int | None = Field(
        None, ge=1, description="Trials in flight; default: all of a step, capped by the server"
    )
    max_attempts: int = Field(3, ge=1, description="Trials for one place when there is no verdict")
    min_group_size: int = Field(2, ge=1, description="Graded members that a group needs")
    max_no_verdict_share: float = Field(
        0.5, gt=0, le=1, description="Share of no_verdict trials in the window that is an outage"
    )
    no_verdict_window: int = Field(32, ge=4, description="Trials over which that share is taken")
    on_outage: Literal["wait", "fail"] = Field(
        "wait", description="What to do in an outage: hold new trials back, or fail the run"
    )
    outage_wait_s: float = Field(60.0, gt=0, description="Pause before trials are tried again")
    eval_interval: int | None = Field(
        None,
        ge=1,
        description="Steps between evaluations on eval_prompt_data; also before the first step "
        "and after the last",
    )
    n_samples_per_eval_prompt: int = Field(
        4, ge=1, description="Trials of each held-out row in an evaluation"
    )
    no_signal_steps: int = Field(
        10, ge=1, description="Steps without any spread of rewards before an alarm"
    )


class AgentServerConfig(Section):
    """The server that runs agents in sandboxes."""

    agent_server_url: str | None = Field(
        None, description="URL of a running agent server; default: the run starts its own"
    )
    tasks_dir: Path = Field(description="One Harbor task directory for each instance_id")
    task_check: Literal["run", "require", "off"] = Field(
        "run",
        description="Before training, check tasks that were not checked as they are now (run), "
        "refuse them (require), or train on any task (off); see `miles tasks check`",
    )
    agent_timeout: float = Field(
        5400, gt=0, description="Seconds that an agent may take; ends the trial, which is graded"
    )
    agent_trial_timeout: float = Field(
        7200, gt=0, description="Seconds that the client allows for a trial; above agent_timeout"
    )
    max_concurrent: int = Field(32, ge=1, description="Sandboxes at once on an own agent server")
    sandbox: str = Field(
        "bubblewrap", description="bubblewrap, or an environment type of Harbor such as docker"
    )
    agent_config: Path | None = Field(
        None, description="YAML with prompts and limits of mini-swe-agent; default: its own"
    )
    agent_python: Path | None = Field(
        None, description="Python of the agent-server environment; default .venv-agent"
    )


class SessionsConfig(Section):
    """The servers that record token-exact sessions."""

    session_server_workers: int = Field(1, ge=1, le=256, description="Session server processes")
    session_server_port: int | None = Field(
        None, ge=1, le=65535, description="First port; workers follow. Default: free ports"
    )
    session_server_external_host: str | None = Field(
        None, description="Host by which sandboxes reach the session servers"
    )
    miles_host_ip: str = Field("127.0.0.1", description="Address that services bind")
    chat_family: str = Field("auto", description="Chat family of the checkpoint, or auto")


class EngineConfig(Section):
    """Rollout engines."""

    engine_urls: list[str] = Field(
        default_factory=list,
        description="Running engines with SGLang's routes; default: embedded ones are started",
    )
    num_engines: int = Field(1, ge=1, description="Embedded engines to start")
    engine_threads: int = Field(1, ge=1, description="Threads of each embedded engine")
    engine_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Engine weights")
    max_running_requests: int = Field(32, ge=1, description="Sequences decoded at once")
    record_generations: bool = Field(
        False, description="Keep the engine's own record of ids and log-probabilities in RUN"
    )


class TrainingConfig(Section):
    """The update: algorithm, optimizer, layout."""

    global_batch_size: int = Field(32, ge=1, description="Trajectories of one optimizer step")
    lr: float = Field(1e-6, gt=0, description="Peak learning rate")
    lr_warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up")
    weight_decay: float = Field(0.1, ge=0, description="AdamW weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1")
    adam_beta2: float = Field(0.98, ge=0, lt=1, description="AdamW beta2")
    clip_grad: float = Field(1.0, gt=0, description="Largest gradient norm")
    optimizer_cpu_offload: bool = Field(
        False,
        description="Keep the optimizer's state (bfloat16: and the float32 weights) in host memory "
        "between updates, for less GPU memory; an error without GPUs",
    )
    advantage_estimator: Literal[
        "grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = Field(
        "grpo",
        description="Advantages; gspo: those of grpo, and the ratio of the sequence; ppo: those of "
        "a critic, a second model that is trained beside the policy",
    )
    grpo_std_normalization: bool = Field(True, description="Divide advantages by the group's std")
    gamma: float = Field(1.0, gt=0, le=1, description="ppo: discount of a sampled token")
    lambd: float = Field(
        1.0, ge=0, le=1, description="ppo: 1 trusts the returns, 0 the critic (lambda of GAE)"
    )
    normalize_advantages: bool = Field(
        True, description="ppo: subtract the mean of a step's advantages, divide by their std"
    )
    value_clip: float = Field(
        0.2, gt=0, description="ppo: how far a value may move in a step before its loss is cut"
    )
    critic_lr: float | None = Field(
        None, gt=0, description="ppo: peak learning rate of the critic; default: lr"
    )
    critic_lr_warmup_steps: int = Field(
        0, ge=0, description="ppo: optimizer steps of the critic's linear warm-up"
    )
    num_critic_only_steps: int = Field(
        0, ge=0, description="ppo: first steps of a run that train the critic alone"
    )
    eps_clip: float = Field(0.2, gt=0, lt=1, description="Lower clip of the ratio")
    eps_clip_high: float = Field(0.28, gt=0, description="Upper clip of the ratio")
    eps_clip_c: float | None = Field(None, gt=1, description="Dual clip; none by default")
    kl_loss_coef: float = Field(
        0.01, ge=0, description="Weight of the KL to the reference in the loss"
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of that KL in the reward instead")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "low_var_kl", description="Estimator of that KL"
    )
    use_unbiased_kl: bool = Field(
        False, description="Multiply the KL in the loss by the ratio of the token"
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus")
    loss_aggregation: Literal["trajectory", "token", "constant"] = Field(
        "trajectory",
        description="Mean per trajectory and then over them; over all tokens; or the sum per "
        "trajectory divided by a constant",
    )
    loss_constant_length: int | None = Field(
        None, ge=1, description="That constant, such as the most tokens of a trajectory"
    )
    use_rollout_logprobs: bool = Field(
        False,
        description="Take the engine's log-probabilities for those of the policy before the step, "
        "and save the pass that computes them",
    )
    use_tis: bool = Field(False, description="Weight by importance (trainer over engine)")
    tis_mode: Literal["tis", "mis", "icepop"] = Field(
        "tis", description="Outside of the bounds: weights are cut (tis) or zero (mis, icepop)"
    )
    tis_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="Weight of a token, of its trajectory, or of that per token"
    )
    tis_clip: float = Field(2.0, gt=0, description="Upper bound of the weight")
    tis_clip_low: float = Field(0.0, ge=0, description="Lower bound of the weight")
    use_routing_replay: bool = Field(
        False,
        description="Of models with experts: send tokens in the update to the experts of the pass "
        "that recorded the old log-probabilities",
    )
    use_rollout_routing_replay: bool = Field(
        False,
        description="Of models with experts: send tokens, in that pass too, to the experts of "
        "the engine",
    )
    lora_rank: int | None = Field(
        None, ge=1, description="Train low-rank adapters of this rank and leave the model frozen"
    )
    lora_alpha: float | None = Field(
        None,
        gt=0,
        description="The adapters' output is multiplied by lora_alpha / lora_rank; default: twice "
        "the rank",
    )
    target_modules: list[str] = Field(
        default_factory=list,
        description="Layers with an adapter, such as q_proj or gate_proj; default: all-linear",
    )
    max_tokens_per_gpu: int = Field(16384, ge=8, description="Tokens of one packed micro-batch")
    num_trainer_ranks: int = Field(1, ge=1, description="Trainer processes")
    micro_batch_size: int | None = Field(
        None, ge=1, description="Most samples of one micro-batch; default: as many as fit"
    )
    packing: bool = Field(True, description="Pack samples one behind the other; false pads them")
    recompute: bool = Field(False, description="Recompute layers backward, for less memory")
    tensor_model_parallel_size: int = Field(1, ge=1, description="Tensor parallel size")
    sequence_parallel: bool = Field(
        False, description="Split activations between tensor parallel ranks too"
    )
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline parallel size")
    context_parallel_size: int = Field(1, ge=1, description="Context parallel size")
    expert_model_parallel_size: int = Field(1, ge=1, description="Expert parallel size")
    trainer_threads: int = Field(1, ge=1, description="Threads of each trainer process on CPU")
    train_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Trainer weights")
    max_nonfinite_steps: int = Field(3, ge=0, description="Unapplied steps before the run fails")
    update_weight_buffer_size: int = Field(
        512 * 2**20,
        ge=2**16,
        description="Bytes of weights that are gathered at once to be pushed or exported; a "
        "larger weight is gathered alone",
    )
    update_weight_transport: Literal["auto", "shm", "disk", "broadcast"] = Field(
        "auto",
        description="How weights reach the engines: shared memory of one machine, a directory, or "
        "a torch.distributed broadcast. auto: shm where it can be, else disk",
    )
    check_weight_update_equal: bool = Field(
        False,
        description="After a push, compare a digest of what each engine serves with the trainer's",
    )


class CheckpointConfig(Section):
    """When to save."""

    save_interval: int = Field(20, ge=1, description="Steps between checkpoints; the last is saved")
    async_save: bool = Field(
        True,
        description="Write checkpoints while the run goes on, from a copy of the state in memory; "
        "where there is no memory for it, and without this, the run waits for each",
    )


class ClusterConfig(Section):
    """Ray, and how the run is supervised."""

    ray_address: str | None = Field(
        None, description="URL of a Ray dashboard; default: the run starts its own head"
    )
    stall_seconds: float = Field(1800, gt=0, description="No new event for this long is a stall")
    first_step_grace_s: float = Field(900, ge=0, description="Extra time before the first event")
    rank_silence_s: float = Field(
        60, gt=1, description="A trainer rank without a sign of life for this long has stalled"
    )
    stop_wait_s: float = Field(
        300,
        ge=1,
        description="A job that is asked to stop may train and save its step for this long",
    )
    max_run_attempts: int = Field(4, ge=1, le=50, description="Ray jobs before the run fails")
    retry_delay_s: float = Field(10, ge=0, description="Pause before the next Ray job")


class TrackingConfig(Section):
    """Where metrics are mirrored."""

    wandb_mode: Literal["offline", "online", "disabled"] = Field(
        "offline", description="Weights & Biases; the key comes from WANDB_API_KEY"
    )
    wandb_project: str = Field("miles-flow", description="W&B project")


class MilesConfig(Section):
    """Everything that decides what a run does."""

    preset: str = Field("custom", description="Preset that the values started from")
    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    rollout: RolloutConfig
    agent_server: AgentServerConfig
    sessions: SessionsConfig = Field(default_factory=SessionsConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _consistent(self) -> MilesConfig:
        from miles_core.config.checks import cross_field_errors

        errors = cross_field_errors(self)
        if errors:
            raise ValueError("\n".join(errors))
        return self
