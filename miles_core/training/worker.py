"""One trainer rank: a plain class that a Ray actor, a test or a script holds."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_core import modeling
from miles_core.checkpoints import adapters
from miles_core.checkpoints.layout import HF_DIR, STATE_FILE, copy_hf_files
from miles_core.checkpoints.manifest import Digests
from miles_core.config.layout import layout_error, read_model_shape
from miles_core.modeling import dist_state, parallel
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_files import write_hf
from miles_core.modeling.hf_weights import HFReader
from miles_core.modeling.replicas import Replicas
from miles_core.training.adapters import describe_adapters, load_with_adapters
from miles_core.training.balance import plan_work, throughput
from miles_core.training.batch import load_rollout, make_sample
from miles_core.training.config import TrainerConfig
from miles_core.training.critic import Critic, start_critic
from miles_core.training.dump import write_dump
from miles_core.training.grpo import GrpoStep
from miles_core.training.guards import (
    check_metrics,
    check_same_batch,
    check_tokens,
    check_weights,
)
from miles_core.training.policy import Policy
from miles_core.training.reduce import max_over_ranks
from miles_core.training.save import Save
from miles_core.training.sft_loss import SFT_NAMES, sft_loss
from miles_core.training.weight_sender import WeightSender


class TrainerWorker:
    """Rank `rank` of `world_size`; all methods are collective, `log_probs` over the ranks that
    work on the same samples (with expert parallelism: over all).

    A single rank ignores the address. `listener`: on rank 0, a socket (descriptor) that listens
    there already, which is taken over. `close` leaves the process groups, so that the process may
    build another worker.
    """

    def __init__(
        self,
        config: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        listener: int | None = None,
    ) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._layout = parallel.start(
            rank,
            world_size,
            master_addr,
            master_port,
            config.tensor_model_parallel_size,
            config.seed,
            config.pipeline_model_parallel_size,
            config.context_parallel_size,
            config.expert_model_parallel_size,
            listener,
        )
        self._policy: Policy | None = None
        self._critic: Critic | None = None
        self._hf_files = Path()
        self.weights = WeightSender(config.update_weight_buffer_size)
        self._save: Save | None = None

    def init(
        self, load: str, ref_load: str | None = None, critic_load: str | None = None
    ) -> dict[str, Any]:
        """Build model and optimizer and load a torch_dist directory.

        `load` is a converted model or an own checkpoint, `ref_load` a torch_dist directory of the
        reference, `critic_load` one that a critic starts from (default: `load`); a critic goes on
        from an own checkpoint that holds it. Returns `iteration` (0: converted model) and `state`,
        what `miles_state.json` of the checkpoint says, or None. Raises ValueError when the loss
        needs a reference and none is given. With adapters the reference is the model under them, so
        `ref_load` says where that is: default, `load` or what the checkpoint names.
        """
        if not dist_state.is_torch_dist(load):
            raise FileNotFoundError(
                f"{load} is not a torch_dist directory; convert the model first"
            )
        if self._config.lora is not None:
            resumed = load_with_adapters(self._build(Path(load) / HF_DIR), load, ref_load)
        else:
            resumed = self._load_all(load, ref_load)
        if self._critic is not None:
            start_critic(self._critic, load, critic_load, resumed)
        state_file = Path(load) / STATE_FILE
        state = json.loads(state_file.read_text()) if state_file.is_file() else None
        return {"iteration": state["iteration"] if state else 0, "state": state}

    def _load_all(self, load: str, ref_load: str | None) -> bool:
        """Model and reference; whether `load` is an own checkpoint."""
        if adapters.read(load) is not None:
            raise ValueError(f"{load} holds adapters alone; set lora_rank to go on with them")
        if ref_load is None and self._config.needs_reference:
            raise ValueError("kl_loss_coef or kl_coef is above 0, so the trainer needs ref_load")
        policy = self._build(Path(load) / HF_DIR)
        resumed = policy.load(load)
        if ref_load is not None and self._config.needs_reference:
            policy.load_reference(ref_load)
        return resumed

    def init_from_hf(self, hf_dir: str) -> None:
        """Build model and optimizer and take the weights of a Hugging Face directory."""
        policy = self._build(Path(hf_dir))
        policy.load_base(hf_dir)
        policy.optimizer.weights_were_replaced()
        if self._critic is not None:
            self._critic.start_from_hf(HFReader(hf_dir), self._spec)

    def _build(self, hf_files: Path) -> Policy:
        self._hf_files = hf_files
        self._spec = read_spec(hf_files)
        world = self._layout.world_size
        fault = layout_error(world, self._config, read_model_shape(hf_files))
        if fault is not None:
            raise ValueError(fault)
        if self._config.optimizer_cpu_offload and modeling.ON_CPU:
            raise ValueError(
                "optimizer_cpu_offload: this rank computes on the CPU, so the optimizer's state "
                "is in host memory as it is; leave --optimizer-cpu-offload out"
            )
        self._policy = Policy(self._config, self._spec)
        self.weights.attach(self._policy.model, self._spec)
        if self._config.advantage_estimator == "ppo":
            self._critic = Critic(self._config, self._spec)
        return self._policy

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("the trainer has no model yet; call init first")
        return self._policy

    def train(self, step: int, rollout_path: str, dump_dir: str | None = None) -> dict[str, Any]:
        """One GRPO step over `rollout_data/<step>.pt`; the metrics, equal on all ranks.

        `dump_dir` is the step's folder `train_data/<step>`. Raises ValueError for a file of another
        step or a sample that does not fit, NonFiniteError after too many refused updates, and
        CorruptionError for ranks that disagree or weights that are no longer finite.
        """
        if self._save is not None and not self._save.background:
            raise RuntimeError("a save that is not in the background is in flight")
        started = time.perf_counter()
        batch = load_rollout(rollout_path)
        if batch.step != step:
            raise ValueError(f"{rollout_path} holds step {batch.step}, not {step}")
        check_tokens(batch.samples, self._spec.vocab_size)
        check_same_batch(batch, rollout_path)
        trained = [self.policy] if self._critic is None else [self.policy, self._critic]
        replicas = [Replicas(model.model) for model in trained]
        for of_model in replicas:
            check_weights(of_model)
        work = GrpoStep(self.policy, self._layout, batch, self._critic)
        metrics: dict[str, Any] = work.run()
        if dump_dir is not None and self._layout.lead:
            write_dump(dump_dir, step, self._layout.rank, work.own_samples)
        for of_model in replicas:
            check_weights(of_model)
        check_metrics(metrics)
        seconds = max_over_ranks({"train": time.perf_counter() - started})["train"]
        tokens = sum(len(sample) for sample in batch.samples)
        metrics |= throughput(
            work.works, tokens, self._layout.world_size, seconds, metrics.get("seconds_update")
        )
        return {"step": step, **metrics, "seconds_train": seconds}

    def sft(self, batches: Iterable[list[dict[str, Any]]]) -> dict[str, Any]:
        """One supervised optimizer step for each batch, a list of {"tokens", "loss_mask"}.

        The loss is the mean of -log p over the batch's masked tokens. Returns the `losses`, and
        `loss`, `grad_norm` and `lr` of the last step.
        """
        losses: list[float] = []
        metrics: dict[str, Any] = {}
        for batch in batches:
            samples = [
                make_sample(
                    f"example {i}",
                    i,
                    0,
                    torch.as_tensor(example["tokens"]),
                    torch.as_tensor(example["loss_mask"]),
                )
                for i, example in enumerate(batch)
            ]
            total = sum(int(s.mask.sum()) for s in samples)
            check_tokens(samples, self._spec.vocab_size)
            if total == 0:
                raise ValueError("a supervised batch has no token to learn")
            for sample in samples:
                sample.weight = 1.0 / total
            work = plan_work(samples, self._layout, self._config, self._spec)
            update = self.policy.update(work.mine, sft_loss, SFT_NAMES)
            losses.append(update.sums["loss"])
            metrics = {
                "loss": losses[-1],
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "nonfinite": update.problems,
            }
        return {**metrics, "losses": losses}

    @torch.no_grad()
    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probability of each token given those before it, float32 [T]; the first is 0."""
        sample = make_sample("", 0, 0, torch.tensor(tokens), torch.arange(len(tokens)) > 0)
        self.policy.record("old", [[sample]])
        return sample.logprobs.get("old", torch.zeros(len(tokens)))

    def save(self, directory: str) -> Digests:
        """Write model, optimizer, its step count and the random states, and a critic with its
        own, and wait for it.

        The directory is one from `checkpoints.store.begin`; publishing it is the caller's part.
        Returns what `finish_save` does and raises as it does.
        """
        self.start_save(directory, background=False)
        return self.finish_save()

    def start_save(self, directory: str, background: bool) -> bool:
        """Begin to write what the next step depends on; whether the rest is done beside it.

        In the background the state is copied, so that the worker may train at once; where the
        copies do not fit into memory it may not train before `finish_save`, and False is returned.
        """
        if self._save is not None:
            raise RuntimeError("a save is in flight; call finish_save first")
        state = self.policy.state()
        if self._critic is not None:
            state = state.with_(self._critic.state())
        self._save = Save(Path(directory), state, background)
        return self._save.background

    def save_ended(self) -> bool:
        """Whether this rank's part of the save in flight is written, or failed. Not collective."""
        return self._save is not None and self._save.ended

    def finish_save(self) -> Digests:
        """Wait for the save in flight and complete its directory; then it may be published.

        Rank 0 returns size and digest of the files that were digested while they were written.
        Raises SaveError, on all ranks, that names the file which could not be written.
        """
        if self._save is None:
            raise RuntimeError("no save is in flight")
        save, self._save = self._save, None
        return save.finish(self._complete)

    def _complete(self, directory: Path) -> None:
        """What a checkpoint holds beside the ranks' files."""
        self._copy_hf_files(directory / HF_DIR)
        describe_adapters(self.policy, str(directory))

    def export_hf(self, directory: str, dtype: str | None = None) -> dict[str, str]:
        """Rank 0 writes a Hugging Face directory; it replaces what is there when complete.

        `dtype` (float32, bfloat16) converts the parameters. The digest of each tensor, on rank 0.
        """
        stream = self.weights.stream(dtype)
        digests: dict[str, str] = {}
        if self._layout.rank != 0:
            write_hf(Path(), stream)
        else:
            target = Path(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            self._copy_hf_files(temporary)
            digests = write_hf(temporary, stream)
            if target.exists():
                shutil.rmtree(target)
            os.replace(temporary, target)
        dist.barrier()
        return digests

    def push_weights(self, action: str, *args: Any) -> Any:
        """A step of a weight push, one of the public methods of WeightSender, or `write` for
        `export_hf`. The answer is rank 0's."""
        if action == "write":
            return self.export_hf(*args)
        return getattr(self.weights, action)(*args)

    def _copy_hf_files(self, target: Path) -> None:
        """Configuration and tokenizer, without the weights."""
        copy_hf_files(self._hf_files, target)

    def close(self) -> None:
        """Leave the process groups."""
        self.weights.end()
        self.weights = WeightSender(self._config.update_weight_buffer_size)
        self._policy = self._critic = self._save = None
        parallel.stop()
