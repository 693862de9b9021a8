"""Ranges of parameters as rectangles of the stored tensors."""

import itertools
import math

import pytest
import torch

from miles_core.modeling.regions import boxes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_the_rectangles_of_any_range_hold_its_values_in_order(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    values = torch.arange(size).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        found = list(boxes(shape, start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        got = []
        for offset, extent in found:
            part = values
            for dim, (first, count) in enumerate(zip(offset, extent, strict=True)):
                part = part.narrow(dim, first, count)
            got += part.reshape(-1).tolist()
        assert got == list(range(start, stop)), (shape, start, stop)
