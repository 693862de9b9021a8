"""What the driver writes down of an error, wherever it was raised."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ray.exceptions import RayTaskError, UnserializableException

from miles_core.cluster.driver import FINAL_ERRORS, first_line, innermost
from miles_core.errors import UserError
from miles_core.training.errors import CorruptionError

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


def test_an_error_that_the_driver_cannot_make_anew_is_told_all_the_same() -> None:
    kept = """ray.exceptions.RayTaskError: ray::RankActor.call() (pid=1, ip=h)
           ^^^^^^^^^^^^^^^^
  File "worker.py", line 267, in finish_save
    raise odd.OddError(f"not saved: {said}")
odd.OddError: not saved: no space: '/disk/x.distcp'
  free some
"""
    told = first_line(innermost(ExceptionGroup("", [UnserializableException(kept)])))
    assert told == "odd.OddError: not saved: no space: '/disk/x.distcp'"
    assert first_line(UnserializableException("")) == "UnserializableException"


def test_errors_of_ranks_are_made_anew_without_what_a_driver_does_not_import() -> None:
    script = (
        "import pickle, sys\n"
        "from miles_core.training import errors\n"
        "kinds = [v for v in vars(errors).values() if isinstance(v, type)]\n"
        "assert len(kinds) >= 3, kinds\n"
        "assert all(str(pickle.loads(pickle.dumps(k('why')))) == 'why' for k in kinds)\n"
        "print({'torch', 'megatron'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
