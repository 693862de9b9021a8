"""Runs mini-swe-agent's default agent inside a sandbox.

    python -I -S run_agent.py PACKAGES < job.json

The job is a JSON object on standard input, so that nothing of it is in a command line: `task`,
`base_url`, `agent`, `model` and `environment` settings, `output_path`. Each model answer and the
end are one JSON line on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

SETTINGS = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/.mini-swe-agent",
}
EXIT_ENDPOINT = 3


def report(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def main() -> int:
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), sys.argv[1]]
    os.environ.update(SETTINGS)
    import logging

    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from plain_model import ModelEndpointError, PlainModel

    for name in SETTINGS:  # the agent's commands do not need them
        del os.environ[name]
    logging.getLogger("minisweagent").setLevel(logging.ERROR)
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    model = PlainModel(job["base_url"], report, **job["model"])
    agent = DefaultAgent(
        model,
        LocalEnvironment(**job["environment"]),
        output_path=job["output_path"],
        **job["agent"],
    )
    try:
        end = agent.run(job["task"])
    except ModelEndpointError as error:
        report({"event": "end", "cause": error.cause, "detail": str(error)})
        return EXIT_ENDPOINT
    except Exception as error:
        traceback.print_exc()
        report({"event": "end", "cause": "agent_crashed", "detail": repr(error)[:400]})
        return 1
    report({"event": "end", "exit_status": end.get("exit_status", ""), "cause": model.limit})
    return 0


if __name__ == "__main__":
    sys.exit(main())
