"""mini-swe-agent for sandboxes that are not ours: containers, clouds.

The agent's loop is a process of this host, and each of its commands is run in the sandbox by
Harbor. Nothing is installed there, the sandbox needs no way to the model, and every model call is
seen and bounded as in a bubblewrap sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sysconfig
import time
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult

from miles_core.agent_server.agents.mini import TRAJECTORY, MiniSweAgent, mini_job
from miles_core.agent_server.sandbox.streams import Completed
from miles_core.agent_server.sandbox.system import agent_python

SCRIPT = Path(__file__).parents[1] / "inside" / "run_outside.py"
CONFIG = "MSWEA_GLOBAL_CONFIG_DIR"
"""Where mini-swe-agent looks for settings of a person: a place without any (`quiet_libraries`)."""
LINE_LIMIT = 64 << 20
"""Bytes of one line of the agent: a command of it."""
ERROR_LIMIT = 65536
ANSWER_LIMIT_S = 15.0
"""How long the sandbox may take to say that a command's time is up."""
KILLED = 137
UNAME = "for one in s n r v m; do uname -$one; done"
NAMES = ("system", "node", "release", "version", "machine")


class MiniSweAgentOutside(MiniSweAgent):
    """mini-swe-agent on this host; `JOBS[trial_id]` is its job."""

    @override
    async def _work(self, instruction: str, environment: BaseEnvironment) -> Completed:
        job = {
            **mini_job(self._job, instruction),
            "base_url": str(self._job.request.base_url),
            "output_path": str(self.logs_dir / Path(TRAJECTORY).name),
            "system": await _system(environment),
        }
        process = await asyncio.create_subprocess_exec(
            *[agent_python(), "-I", "-S", str(SCRIPT), sysconfig.get_path("purelib")],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", CONFIG: os.environ[CONFIG]},
            cwd="/",
            limit=LINE_LIMIT,
        )
        assert process.stderr
        errors = asyncio.create_task(_tail(process.stderr))
        try:
            await self._serve(process, job, environment)
            return Completed(await process.wait(), err=await errors)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await errors

    async def _serve(
        self,
        process: asyncio.subprocess.Process,
        job: dict[str, Any],
        environment: BaseEnvironment,
    ) -> None:
        """Give the agent its job, and run its commands until it ends."""
        assert process.stdin and process.stdout
        answer: dict[str, Any] = job
        while True:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                process.stdin.write(json.dumps(answer).encode() + b"\n")
                await process.stdin.drain()
            while line := await process.stdout.readline():
                wanted = _command(line)
                if wanted is not None:
                    answer = await _execute(environment, wanted)
                    break
                self._job.on_line(line)
            else:
                return


def _command(line: bytes) -> dict[str, Any] | None:
    """The command that a line of the agent asks for; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    wanted = isinstance(event, dict) and event.get("event") == "command"
    return event if wanted else None


async def _execute(environment: BaseEnvironment, event: dict[str, Any]) -> dict[str, Any]:
    """Run one command, with what it left in its process group when its time is up."""
    limit = int(event["timeout"])
    problem = _no_command(event["command"])
    if problem is not None:
        told = f"An error occurred while executing the command: {problem}"
        return {"output": "", "returncode": -1, "exception_info": told}
    command = shlex.quote(event["command"])
    bounded = (
        f"if command -v timeout >/dev/null 2>&1; then exec timeout -s KILL {limit} "
        f"bash -c {command} 2>&1; else exec bash -c {command} 2>&1; fi"
    )
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit + ANSWER_LIMIT_S):
            done = await environment.exec(bounded, cwd=event["cwd"] or None, env=event["env"])
    except TimeoutError:
        done = ExecResult(return_code=KILLED)
    output = {"output": done.stdout or "", "returncode": done.return_code, "exception_info": ""}
    if done.return_code in (KILLED, -9) and time.monotonic() - began >= limit:
        told = f"An error occurred while executing the command: it timed out after {limit} seconds"
        return {**output, "returncode": -1, "exception_info": told}
    return output


def _no_command(value: Any) -> str | None:
    """Why no shell takes this as a command: what the policy wrote may be anything."""
    if not isinstance(value, str):
        return "it is not text"
    if "\0" in value or any("\ud800" <= one <= "\udfff" for one in value):
        return "it has a NUL or half a surrogate pair"
    return None


async def _system(environment: BaseEnvironment) -> dict[str, str]:
    """What `uname` says in the sandbox, under the names that prompts have for it."""
    said = (await environment.exec(UNAME)).stdout or ""
    lines = said.splitlines()
    return dict(zip(NAMES, [*lines, *[""] * len(NAMES)], strict=False))


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read to the end; the last bytes."""
    kept = b""
    while chunk := await stream.read(65536):
        kept = (kept + chunk)[-ERROR_LIMIT:]
    return kept
