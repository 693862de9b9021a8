"""A process that imports the trainer once and forks ranks on request (`rank_helpers.fork_ranks`).

A line of JSON on the standard input names a module with a function `rank_main(request, rank, world,
out)`; the answer is a line with the ranks' exit statuses, once all have ended. What `rank_main`
returned lies as JSON in `<out>.rank<rank>`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "modeling"))

import trainer_helpers  # noqa: E402, F401
from rank_helpers import PORTS, hold_ports, let_go  # noqa: E402


def fork_rank(call: dict[str, Any], rank: int) -> int:
    """The process id of a rank."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        out = Path(call["out"])
        main = importlib.import_module(call["module"]).rank_main
        answer = main(call["request"], rank, call["world"], out)
        out.with_name(f"{out.name}.rank{rank}").write_text(json.dumps(answer))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run(call: dict[str, Any]) -> list[int]:
    """Exit statuses of the ranks; the others are ended where one fails or the time is over."""
    until = time.monotonic() + call["timeout_s"]
    hold_ports(PORTS)
    pids = [fork_rank(call, rank) for rank in range(call["world"])]
    let_go()
    codes: dict[int, int] = {}
    ended = False
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
        if not ended and (any(codes.values()) or time.monotonic() > until):
            ended = True
            for left in set(pids) - set(codes):
                os.kill(left, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def main() -> None:
    gc.freeze()  # what was imported is not looked through again in every fork
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
