"""A small process that forks into sandboxes and becomes a command there.

python -I -S fork_commands.py SOCKET
"""

from __future__ import annotations

import os
import sys
from typing import Any

NOT_FOUND = 127
NOT_STARTED = 126


def become_program(argv: list[str]) -> int:
    """Become a program; returns only when that fails, as a shell would."""
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
    import files
    from enter import help_server

    def command(order: dict[str, Any]) -> int:
        if "files" in order:
            return files.work(order["files"])
        return become_program(order["argv"])

    files.load()
    help_server(int(sys.argv[1]), command)


if __name__ == "__main__":
    main()
