"""Samples into packed micro-batches, and those over the data-parallel ranks."""

from __future__ import annotations


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`; longest first, ties by index.

    Raises ValueError for a length above the capacity.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(
                f"a sample of {length} tokens does not fit max_tokens_per_gpu ({capacity})"
            )
        for place, free in enumerate(room):
            if length <= free:
                bins[place].append(index)
                room[place] -= length
                break
        else:
            bins.append([index])
            room.append(capacity - length)
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


def micro_batches(lengths: list[int], capacity: int, ranks: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, each a list of sample indices; equally many on all ranks.

    Bins are split until their number is a multiple of `ranks` (empty ones fill up when nothing
    can be split), then the heaviest bin goes to the lightest rank that has places left.
    """
    bins = first_fit_decreasing(lengths, capacity)
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
