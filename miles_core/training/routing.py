"""Routing replay: the update sends tokens to the experts that they went to before.

Two ways, which may be combined:

- `use_routing_replay`: to those of the pass that recorded the old log-probabilities (GSPO, arXiv
  2507.18071, section 5.3);
- `use_rollout_routing_replay`: to those of the engine, in that pass too (R3, arXiv 2510.11370). A
  token of which the engine tells nothing goes where its routers send it, or with both settings
  where they sent it in the old pass.

The reference always routes for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec, MoeSpec
from miles_core.modeling.routing import RoutedPass, sparse_layers
from miles_core.training.batch import Packed, RolloutBatch, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.guards import gather_names


class RoutingReplay:
    """The experts of a step's tokens, over its passes."""

    def __init__(self, config: TrainerConfig, spec: ModelSpec, model: PolicyModel) -> None:
        if spec.moe is None:
            raise ValueError(
                f"routing replay is asked for, but {spec.model_type} has no experts; set "
                "--no-use-routing-replay and --no-use-rollout-routing-replay"
            )
        self._moe = spec.moe
        self._from_engine = config.use_rollout_routing_replay
        self._from_old = config.use_routing_replay
        self._layers = sparse_layers(model)
        self._model = model
        self._tokens: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def begin(self, batch: RolloutBatch, own: Sequence[TrainSample]) -> None:
        """Take the engine's experts of this rank's samples. Collective.

        Raises ValueError, naming the trial, for experts that the model does not have, and when no
        sample of the batch has any.
        """
        self._counts = Counter()
        tokens = known = sum(len(s) for s in own)
        if self._from_engine:
            if all(sample.engine_experts is None for sample in batch.samples):
                raise ValueError(
                    f"use_rollout_routing_replay: no sample of step {batch.step} has "
                    "routed_experts; were they rolled out without that setting?"
                )
            taken = self._take_engine_experts(own)
            known = known if self._from_old else taken
        self._tokens = {"known": float(known), "all": float(tokens)}

    def _take_engine_experts(self, own: Sequence[TrainSample]) -> int:
        """Of how many tokens the engine tells all experts. Collective; raises on all ranks."""
        taken, faults = 0, []
        for sample in own:
            try:
                experts = engine_experts(sample, self._moe)
            except ValueError as error:
                faults.append(str(error))
                continue
            taken += int((experts >= 0).flatten(1).all(1).sum())
            sample.experts = experts[:, self._places()]
        if faults := gather_names(faults):
            raise ValueError(faults[0])
        return taken

    def _places(self) -> list[int]:
        """Where this rank's layers stand among all that have experts."""
        every = [number for number, sparse in enumerate(self._moe.sparse) if sparse]
        return [every.index(number) for number in self._layers]

    def start(self, name: str, batches: Sequence[Packed], backward: bool) -> RoutedPass | None:
        """The pass `name` with what its tokens are given; None for passes that route themselves."""
        if name == "ref":
            return None
        return RoutedPass(
            self._model,
            [packed.experts() for packed in batches],
            backward=backward,
            record=self._from_old and name == "old",
        )

    def end(self, name: str, routed: RoutedPass, batches: Sequence[Packed]) -> None:
        """Keep what the pass has told."""
        kind = "old" if name == "old" else "update"
        self._counts[f"replayed {kind}"] += routed.replayed
        self._counts[f"differing {kind}"] += routed.differing
        for packed, taken in zip(batches, routed.taken, strict=bool(routed.taken)):
            packed.keep_experts(taken)

    def metrics(self) -> dict[str, float]:
        """Shares, equal on all ranks. Collective.

        `routing_replayed`: of the step's tokens, those whose experts the update was given.
        `routing_differs`: of the choices that the update was given, those that the updated model
        would have made differently; `rollout_routing_differs`: the same of the old model, whose
        weights the engine had. Both are absent without such a pass.
        """
        names = ("replayed old", "differing old", "replayed update", "differing update")
        total = torch.tensor([float(self._counts[name]) for name in names], dtype=torch.float64)
        tokens = torch.tensor([self._tokens["known"], self._tokens["all"]], dtype=torch.float64)
        total, tokens = total.to(parallel.device()), tokens.to(parallel.device())
        dist.all_reduce(total)
        dist.all_reduce(tokens, group=parallel.dp_group())
        replayed_old, differing_old, replayed, differing = total.tolist()
        metrics = {
            "routing_replayed": (tokens[0] / tokens[1].clamp(min=1)).item(),
        }
        if replayed:
            metrics["routing_differs"] = differing / replayed
        if replayed_old:
            metrics["rollout_routing_differs"] = differing_old / replayed_old
        return metrics


def engine_experts(sample: TrainSample, moe: MoeSpec) -> torch.Tensor:
    """The experts [T, sparse layers, k] int16 of a sample, -1 where the engine tells none.

    The engine gives a row for each token but the last, of all layers or of those with experts.
    Raises ValueError, naming the trial, for rows of another size or number, and for experts that
    the model does not have or that a token goes to twice.
    """
    sparse = torch.tensor(moe.sparse).nonzero().squeeze(1)
    whole = torch.full((len(sample), len(sparse), moe.top_k), -1, dtype=torch.int16)
    rows = sample.engine_experts
    if rows is None:
        return whole
    where = f"routed_experts of sample {sample.index} of {sample.trial_id}"
    sizes = {len(layers) * moe.top_k: layers for layers in (sparse, torch.tensor(moe.sparse))}
    if rows.dim() != 2 or len(rows) != len(sample) - 1 or rows.shape[1] not in sizes:
        raise ValueError(
            f"{where} are {list(rows.shape)}, not {len(sample) - 1} rows of "
            f"{' or '.join(map(str, sizes))} (layers x {moe.top_k} experts of a token)"
        )
    experts = rows.view(len(rows), -1, moe.top_k)
    if experts.shape[1] != len(sparse):
        experts = experts[:, sparse]
    ordered = experts.sort(-1).values
    absent = (ordered[..., -1] == -1) & (ordered[..., 0] == -1)
    wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= moe.num_experts)
    wrong |= (ordered.diff(dim=-1) == 0).any(-1)
    wrong &= ~absent
    if wrong.any():
        token, layer = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{where}: token {token} goes to {experts[token, layer].tolist()} in layer "
            f"{int(sparse[layer])}; they must be {moe.top_k} different ones below {moe.num_experts}"
        )
    whole[:-1] = experts
    return whole
