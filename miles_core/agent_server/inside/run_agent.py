"""Runs mini-swe-agent's default agent, in a process that `fork_agents` put into a sandbox.

Each model answer and the end are one JSON line on standard output.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import traceback
from typing import Any

SETTINGS = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/.mini-swe-agent",
}
MODULES = (
    "minisweagent.agents.default",
    "minisweagent.environments.local",
    "plain_model",
    "encodings.idna",  # http.client takes it at its first request
    "encodings.unicode_escape",  # jinja2 takes it at the first string of a template,
    "jinja2.debug",  # and this when one fails
)
EXIT_ENDPOINT = 3


def report(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def load() -> None:
    """Import all that an agent needs, before there is one."""
    os.environ.update(SETTINGS)
    for name in MODULES:
        importlib.import_module(name)
    logging.getLogger("minisweagent").setLevel(logging.ERROR)


def run(job: dict[str, Any], environment: Any = None) -> int:
    """Run the agent of a job (`task`, `base_url`, `agent`, `model`, `environment`,
    `output_path`); the exit status.

    Without an `environment` its commands run here. What the system refuses it then, and signals
    that end it, are their doing: they have used up or taken away what it needs. It just ends.
    """
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from plain_model import ModelEndpointError, PlainModel

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    model = PlainModel(job["base_url"], report, **job["model"])
    agent = DefaultAgent(
        model,
        environment or LocalEnvironment(**job["environment"]),
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
        return 0 if environment is None and isinstance(error, OSError | MemoryError) else 1
    report({"event": "end", "exit_status": end.get("exit_status", ""), "cause": model.limit})
    return 0
