"""A Ray job that does no work: it journals steps, and fails on demand (`RUN/standin.json`)."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from miles_core.runs.directory import RunDir
from miles_core.runs.files import write_json
from miles_core.runs.fold import fold
from miles_core.runs.journal import Journal, read


def entrypoint(run: RunDir, attempt: int) -> list[str]:
    """The command of an attempt."""
    return [sys.executable, __file__, str(run.path), str(attempt)]


def main() -> int:
    run, attempt = RunDir(sys.argv[1]), int(sys.argv[2])
    plan = json.loads((run.path / "standin.json").read_bytes())
    folder = run.attempt_dir(attempt)
    log = (folder / "driver.log").open("a", buffering=1)
    ending = {"state": "completed", "detail": "", "step": 0}

    def asked(*_: object) -> None:
        ending.update(state="interrupted", detail="asked to stop")
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, asked)
    journal = Journal(run.journal)
    first = fold(read(run.journal)).steps_done
    journal.append(
        "run_started",
        attempt=attempt,
        from_step=first,
        steps_total=plan["steps"],
        rows=1,
        groups_per_step=1,
        group_size=2,
    )
    try:
        for step in range(first, plan["steps"]):
            print(f"step {step} in process {os.getpid()}", file=log)
            if plan.get("crash_at", {}).get(str(attempt)) == step:
                print("the stand-in breaks", file=log)
                os._exit(7)
            if plan.get("hang_at", {}).get(str(attempt)) == step:
                time.sleep(1000)
            time.sleep(plan["seconds"])
            journal.append("step_trained", step=step, metrics={"reward_mean": 0.5})
    except KeyboardInterrupt:
        time.sleep(plan.get("save_seconds", 0))
    write_json(folder / "exit.json", ending)
    journal.append("run_ended", state=ending["state"], detail=ending["detail"])
    return 0 if ending["state"] == "completed" else 1


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: standin_driver.py RUN ATTEMPT")
    sys.exit(main())
