"""What the driver writes down of an error, wherever it was raised."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from miles_core.cluster.driver import FINAL_ERRORS, first_line, innermost
from miles_core.errors import UserError
from miles_core.training.guards import CorruptionError

ERRORS = [
    (ValueError("4 layers are not a multiple\nof 5"), "ValueError: 4 layers are not a multiple"),
    (CorruptionError("weights are not finite"), "CorruptionError: weights are not finite"),
    (UserError("x.pt: no room", "Free some."), "UserError: x.pt: no room Free some."),
    (AssertionError(), "AssertionError"),
]


def of_a_rank(error: Exception) -> BaseException:
    """The error as Ray raises it in the driver."""
    task = RayTaskError("setup", "Traceback", error, proctitle="ray::RankActor", pid=1, ip="h")
    raised: BaseException = task.as_instanceof_cause()
    return raised


@pytest.mark.parametrize(("error", "line"), ERRORS, ids=lambda value: type(value).__name__)
def test_the_reason_is_told_and_not_where_it_came_from(error: Exception, line: str) -> None:
    final = isinstance(error, FINAL_ERRORS)
    for raised in (error, of_a_rank(error), ExceptionGroup("", [of_a_rank(error)])):
        cause = innermost(raised)
        assert first_line(cause) == line
        assert isinstance(cause, FINAL_ERRORS) == final
