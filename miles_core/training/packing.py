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


def _heaviest_first(costs: list[float]) -> list[int]:
    """Indices by cost, the heaviest first, ties by index."""
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def spread_over_ranks(costs: list[float], ranks: int) -> list[list[int]]:
    """Indices for each rank: the heaviest first, each to the rank with the least so far.

    The largest sum is at most 4/3 - 1 / (3 ranks) of the best possible one (R. L. Graham, "Bounds
    on multiprocessing timing anomalies", 1969).
    """
    plan: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for index in _heaviest_first(costs):
        rank = min(range(ranks), key=lambda r: (total[r], r))
        plan[rank].append(index)
        total[rank] += costs[index]
    return plan


def even_bins(
    lengths: list[int], costs: list[float], limits: Limits, count: int
) -> list[list[int]] | None:
    """`count` bins of about equal cost that fit the limits; None when this way finds none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, longest, total = [0] * count, [0] * count, [0.0] * count
    for index in _heaviest_first(costs):
        length = lengths[index]
        fitting = [
            b
            for b in range(count)
            if limits.fits(len(bins[b]) + 1, tokens[b] + length, max(longest[b], length))
        ]
        if not fitting:
            return None
        place = min(fitting, key=lambda b: (total[b], b))
        bins[place].append(index)
        tokens[place] += length
        longest[place] = max(longest[place], length)
        total[place] += costs[index]
    return bins


def micro_batches(
    lengths: list[int],
    limits: Limits,
    ranks: int,
    costs: list[float] | None = None,
    equal: bool = False,
) -> list[list[list[int]]]:
    """For each rank its micro-batches, each a list of sample indices; the same on every call.

    Samples are spread over the ranks so that each has about as much to compute (`costs` of the
    samples; default: their lengths), then packed: as few micro-batches as fit, of about equal
    cost, the heaviest first. With `equal` no rank has fewer than another if it has the samples
    for it: then each is smaller, at the same number of passes. Raises ValueError for a sample that
    does not fit.
    """
    lengths = [limits.length(length) for length in lengths]
    if costs is None:
        costs = [float(length) for length in lengths]
    of_ranks = spread_over_ranks(costs, ranks)
    packed = [_pack(members, lengths, costs, limits) for members in of_ranks]
    if not equal:
        return packed
    most = max(len(bins) for bins in packed)
    return [_pack(members, lengths, costs, limits, min(most, len(members))) for members in of_ranks]


def _pack(
    members: list[int], lengths: list[int], costs: list[float], limits: Limits, least: int = 0
) -> list[list[int]]:
    """Bins of these samples, `least` or more where that is possible."""
    own_lengths, own_costs = [lengths[i] for i in members], [costs[i] for i in members]
    bins = first_fit_decreasing(own_lengths, limits)
    # padded micro-batches are of like lengths, which evening out would mix
    if not limits.padded or least > len(bins):
        even = even_bins(own_lengths, own_costs, limits, max(least, len(bins)))
        bins = bins if even is None else even
    chosen = [sorted(members[i] for i in b) for b in bins]
    return sorted(chosen, key=lambda b: (-sum(costs[i] for i in b), b))
