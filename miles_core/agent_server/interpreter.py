"""Whether this Python can run the agent server: Harbor needs a newer one than the trainer's."""

from __future__ import annotations

import importlib.util
import platform
import sys

from miles_core.errors import UserError

OLDEST = (3, 12)


def check_interpreter() -> None:
    """Raise UserError in a Python that is too old or lacks Harbor."""
    if sys.version_info < OLDEST:
        lacking = f"is Python {platform.python_version()}; the agent server needs 3.12 or newer"
    elif importlib.util.find_spec("harbor") is None:
        lacking = "lacks the package harbor, which the agent server needs"
    else:
        return
    raise UserError(
        f"{sys.executable} {lacking}",
        "Use .venv-agent/bin/miles-agent-server; `make setup` makes that environment.",
    )
