"""A process that has the agent's code loaded and forks into sandboxes.

python -I -S fork_agents.py SOCKET PACKAGES
"""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> None:
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), sys.argv[2]]
    import run_agent
    from enter import help_server

    def work(order: dict[str, Any]) -> int:
        return run_agent.run(order["job"])

    run_agent.load()
    help_server(int(sys.argv[1]), work)


if __name__ == "__main__":
    main()
