"""The work of an optimizer step, spread over data-parallel ranks by what it costs to compute."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.modeling.flops import forward_flops, training_flops
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.parallel import Layout
from miles_core.training.batch import TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.packing import limits, micro_batches


@dataclass
class Work:
    """This rank's micro-batches, and the operations of each data-parallel rank's update."""

    mine: list[list[TrainSample]]
    flops: list[float]


def plan_work(
    samples: list[TrainSample], layout: Layout, config: TrainerConfig, spec: ModelSpec
) -> Work:
    """Micro-batches of the samples; the plan is the same on all ranks.

    A sample costs what `forward_flops` counts: a part that grows with its length, for projections,
    feed-forward or active experts, and the logits of its sampled tokens, and attention, which
    grows with the square. The numbers of micro-batches differ over the ranks, except where
    experts are spread over them: then each pass needs all.
    """
    sampled = [int(sample.mask.sum()) for sample in samples]
    pairs = list(zip(samples, sampled, strict=True))
    plan = micro_batches(
        [len(sample) for sample in samples],
        limits(config),
        layout.dp_size,
        costs=[forward_flops(spec, len(sample), count) for sample, count in pairs],
        equal=config.expert_model_parallel_size > 1,
    )
    mine = [[samples[i] for i in members] for members in plan[layout.dp_rank]]
    for number, members in enumerate(mine):
        for sample in members:
            sample.micro_batch = number
    flops = [training_flops(spec, len(sample), count) for sample, count in pairs]
    return Work(mine, [sum(flops[i] for bins in of_rank for i in bins) for of_rank in plan])


def throughput(
    works: list[Work], tokens: int, ranks: int, seconds: float, seconds_update: float | None
) -> dict[str, float]:
    """Metrics of a step over `tokens` tokens on `ranks` ranks.

    `tokens_per_second` is of the whole step, `actor_train_tflops` of the update alone: 10^12 model
    operations (forward and backward, without recomputation) for each second and rank, of which the
    share of the device's peak is its model FLOPs use. `dp_imbalance` is the operations of the
    data-parallel rank with most, over the mean, 1 at best; the others wait for that one.
    """
    metrics = {"tokens_per_second": tokens / seconds}
    most = sum(max(work.flops) for work in works)
    mean = sum(sum(work.flops) / len(work.flops) for work in works)
    metrics["dp_imbalance"] = most / mean if mean else 1.0
    if seconds_update:
        total = sum(sum(work.flops) for work in works)
        metrics["actor_train_tflops"] = total / seconds_update / ranks / 1e12
    return metrics
