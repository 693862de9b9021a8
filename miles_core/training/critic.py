"""The critic of this rank: the value of each sampled token, and updates towards the returns."""

from __future__ import annotations

import torch

from miles_core.checkpoints import adapters
from miles_core.modeling import dist_state
from miles_core.modeling.cut import Cut
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.hf_weights import HFReader, load_hf
from miles_core.modeling.log_probs import Head
from miles_core.modeling.value_model import HEAD_NAME, build_value_model, token_values
from miles_core.training.batch import Packed, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.trained_model import MicroBatches, TrainedModel, packed_batches

NAME = "critic"
"""Its part of a checkpoint."""


class Critic(TrainedModel):
    """A model like the policy with a value head, in the same layout, with its own optimizer.

    The value of a token is the expected return before it: that of the hidden state which predicts
    it.
    """

    def __init__(self, config: TrainerConfig, spec: ModelSpec) -> None:
        model = build_value_model(
            spec,
            config.tensor_model_parallel_size,
            torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
            config.sequence_parallel,
            config.recompute,
            seed=config.seed,
        )
        lr = config.lr if config.critic_lr is None else config.critic_lr
        super().__init__(config, model, lr, config.critic_lr_warmup_steps)

    @torch.no_grad()
    def record(self, micro_batches: MicroBatches) -> None:
        """Give every sample its `values`. Collective."""
        batches = packed_batches(micro_batches, self.device)
        values: list[torch.Tensor] = []

        def last(head: Head, targets: torch.Tensor, number: int, cut: Cut) -> torch.Tensor:
            values.append(self._outputs(head, targets, batches[number], cut))
            return values[-1].sum()

        self.run("values", batches, last, backward=False)
        for packed, part in self.everywhere(batches, values):
            for sample, own in packed.parts(part):
                sample.values = own

    def _outputs(self, head: Head, targets: torch.Tensor, packed: Packed, cut: Cut) -> torch.Tensor:
        return cut.join(token_values(head))

    def _keep(self, packed: Packed, values: torch.Tensor) -> None:
        """Nobody asks for the values after the step."""

    def _inputs(self, sample: TrainSample) -> dict[str, torch.Tensor]:
        assert sample.values is not None and sample.returns is not None
        return {"values": sample.values, "returns": sample.returns}

    def start_from_hf(self, reader: HFReader, spec: ModelSpec) -> None:
        """Take the weights of a Hugging Face directory under the fresh value head."""
        load_hf(self.model, spec, reader, leave_out=HEAD_NAME)
        self.optimizer.weights_were_replaced()

    def start_from(self, directory: str) -> None:
        """Take the weights of the critic in a torch_dist directory, or else those of its policy
        under the fresh value head. Collective."""
        if dist_state.has(directory, NAME):
            dist_state.load_named(directory, NAME, self.model)
        elif adapters.read(directory) is not None:
            raise ValueError(f"critic_load: {directory} holds adapters alone, and no critic")
        else:
            dist_state.load(directory, self.model, leave_out=HEAD_NAME)
        self.optimizer.weights_were_replaced()

    def load(self, directory: str) -> None:
        """Everything that the next update depends on, from an own checkpoint. Collective."""
        extra = dist_state.load_named(directory, NAME, self.model, self.optimizer)
        self.refused_updates = extra["refused_updates"]

    def state(self) -> dist_state.State:
        """What `load` needs of this rank, to be stored beside the policy's."""
        extra = {"refused_updates": self.refused_updates}
        return dist_state.collect_named(NAME, self.model, self.optimizer, extra)


def start_critic(critic: Critic, load: str, critic_load: str | None, resumed: bool) -> None:
    """Go on from the own checkpoint `load` (`resumed`), or begin from `critic_load`, or from the
    converted model `load`. Collective.

    Raises ValueError for a checkpoint that has neither a critic nor a whole policy, or when the one
    to go on from has no critic; FileNotFoundError for a `critic_load` that is no checkpoint.
    """
    source = load if resumed or critic_load is None else critic_load
    if not dist_state.is_torch_dist(source):
        raise FileNotFoundError(f"critic_load: {source} is not a torch_dist directory")
    if resumed and not dist_state.has(source, NAME):
        raise ValueError(f"{source} holds no critic; it is of a run without ppo")
    if resumed:
        critic.load(source)
    else:
        critic.start_from(source)
