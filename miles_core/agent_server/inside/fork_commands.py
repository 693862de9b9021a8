"""A small process that forks into sandboxes and becomes a command there.

python -I -S fork_commands.py SOCKET
"""

from __future__ import annotations

import os
import select
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


def start_program(argv: list[str]) -> int:
    """Start a program and wait for its end, or for that of the standard input: then it stays.

    The exit status, as a shell has it; 0 for a program that stays, as a child of the sandbox's
    first process.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = become_program(argv)
        sys.stderr.flush()
        os._exit(code)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (0, ended):
        poll.register(descriptor, select.POLLIN)
    if all(descriptor != ended for descriptor, _ in poll.poll()):
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def main() -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import files
    from enter import help_server

    def command(order: dict[str, Any]) -> int:
        if "files" in order:
            return files.work(order["files"])
        return (start_program if "stays" in order else become_program)(order["argv"])

    files.load()
    help_server(int(sys.argv[1]), command)


if __name__ == "__main__":
    main()
