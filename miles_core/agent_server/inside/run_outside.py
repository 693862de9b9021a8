"""Runs mini-swe-agent on the server's host, for a sandbox that only the server reaches.

python -I -S run_outside.py PACKAGES

The first line of standard input is the job. What `run_agent` reports are lines of standard output;
so is each command that the agent wants, `{"event": "command", "command", "cwd", "env", "timeout"}`,
and the next line of standard input is its output, as mini-swe-agent wants it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CONFIG = "MSWEA_GLOBAL_CONFIG_DIR"


def main() -> int:
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), sys.argv[1]]
    import run_agent

    run_agent.SETTINGS[CONFIG] = os.environ[CONFIG]
    run_agent.load()
    from minisweagent.environments.local import LocalEnvironment

    class Remote(LocalEnvironment):
        """An environment whose commands another process runs."""

        def __init__(self, system: dict[str, str], **config: Any) -> None:
            super().__init__(**config)
            self._system = system

        def execute(
            self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
        ) -> dict[str, Any]:
            run_agent.report(
                {
                    "event": "command",
                    "command": action.get("command", ""),
                    "cwd": cwd or self.config.cwd,
                    "env": self.config.env,
                    "timeout": timeout or self.config.timeout,
                }
            )
            output = json.loads(sys.stdin.readline())
            self._check_finished(output)
            return output

        def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
            return {**self.config.model_dump(), **self._system, **kwargs}

    job = json.loads(sys.stdin.readline())
    return run_agent.run(job, Remote(job["system"], **job["environment"]))


if __name__ == "__main__":
    sys.exit(main())
