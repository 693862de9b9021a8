"""Task directories as they are found in real collections, and what each must end in.

`ODD` maps a name to a task and to what `oracle` and `nop` end in: a reward, or the cause of a
`no_verdict`. `make` writes one; none of them is kept as files.
"""

from __future__ import annotations

from pathlib import Path

import odd_tasks_files
import odd_tasks_verifiers
from agent_server_helpers import make_task
from odd_tasks_kinds import Odd

ODD: dict[str, Odd] = {**odd_tasks_files.ODD, **odd_tasks_verifiers.ODD}


def make(root: Path, name: str) -> Path:
    """Write the odd task `name` into `root`."""
    odd = ODD[name]
    task = make_task(root, name)
    for path, content in odd.files.items():
        file = task / path
        if content is None:
            file.unlink()
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if odd.arrange is not None:
        odd.arrange(task)
    return task
