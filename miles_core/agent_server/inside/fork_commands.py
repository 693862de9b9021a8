"""A small process that forks into sandboxes and becomes a command there.

python -I -S fork_commands.py SOCKET
"""

from __future__ import annotations

import os
import sys
from typing import Any

NOT_FOUND = 127
NOT_STARTED = 126


def work(order: dict[str, Any]) -> int:
    """Become the command of an order; returns only when that fails, as a shell would.

    A process with mounts of its own waits for an end of file: its namespace is taken over then.
    """
    if "secluded" in order:
        print("ready", flush=True)
        sys.stdin.read()
        return 0
    argv = order["argv"]
    try:
        os.execvpe(argv[0], argv, os.environ)
    except FileNotFoundError:
        print(f"{argv[0]}: not found", file=sys.stderr)
        return NOT_FOUND
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED


def main() -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from enter import serve

    serve(int(sys.argv[1]), work)


if __name__ == "__main__":
    main()
