"""Samples into packed micro-batches, and those over the data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.config.layout import padding
from miles_core.training.config import TrainerConfig


@dataclass(frozen=True)
class Limits:
    """What a micro-batch may hold: `tokens` in all, padding included, and `samples` (None: any).

    A sample is padded to a multiple of `unit`; with `padded` to the longest of its micro-batch.
    `slack` tokens are kept free, for padding of the whole.
    """

    tokens: int
    samples: int | None = None
    padded: bool = False
    unit: int = 1
    slack: int = 0

    def length(self, tokens: int) -> int:
        """Length of a sample with its padding."""
        return -(-tokens // self.unit) * self.unit

    def fits(self, count: int, total: int, longest: int) -> bool:
        """Whether `count` samples fit, of `total` tokens and a longest one (with padding)."""
        size = longest * count if self.padded else total
        return (self.samples is None or count <= self.samples) and size + self.slack <= self.tokens


def limits(config: TrainerConfig) -> Limits:
    """What the micro-batches of a configuration may hold, over all context-parallel ranks."""
    unit, slack = padding(config)
    return Limits(
        tokens=config.max_tokens_per_gpu * config.context_parallel_size,
        samples=config.micro_batch_size,
        padded=not config.packing,
        unit=unit,
        slack=slack,
    )


def first_fit_decreasing(lengths: list[int], limits: Limits) -> list[list[int]]:
    """Bins of indices that fit the limits; longest first, ties by index.

    Raises ValueError for a sample that does not fit alone.
    """
    bins: list[list[int]] = []
    totals: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not limits.fits(1, length, length):
            raise ValueError(
                f"a sample of {length} tokens does not fit max_tokens_per_gpu "
                f"({limits.tokens} tokens in a micro-batch, padding included)"
            )
        for place, members in enumerate(bins):
            if limits.fits(len(members) + 1, totals[place] + length, lengths[members[0]]):
                members.append(index)
                totals[place] += length
                break
        else:
            bins.append([index])
            totals.append(length)
    return bins


def _halves(members: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Two parts of about equal length: the longest goes to the lighter part."""
    parts: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in sorted(members, key=lambda i: (-lengths[i], i)):
        lighter = 0 if loads[0] <= loads[1] else 1
        parts[lighter].append(index)
        loads[lighter] += lengths[index]
    return parts


def micro_batches(lengths: list[int], limits: Limits, ranks: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, each a list of sample indices; equally many on all ranks.

    Bins are split until their number is a multiple of `ranks` (empty ones fill up when nothing
    can be split), then the heaviest bin goes to the lightest rank that has places left.
    """
    lengths = [limits.length(length) for length in lengths]
    bins = first_fit_decreasing(lengths, limits)
    while len(bins) % ranks:
        splittable = [b for b in bins if len(b) > 1]
        if not splittable:
            bins.append([])
            continue
        heaviest = max(splittable, key=lambda b: sum(lengths[i] for i in b))
        bins.remove(heaviest)
        bins.extend(_halves(heaviest, lengths))
    loads = [sum(lengths[i] for i in b) for b in bins]
    places = len(bins) // ranks
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for place in sorted(range(len(bins)), key=lambda b: (-loads[b], b)):
        rank = min((r for r in range(ranks) if len(plan[r]) < places), key=lambda r: (total[r], r))
        plan[rank].append(sorted(bins[place]))
        total[rank] += loads[place]
    return plan
