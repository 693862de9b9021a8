"""What a trial costs beside the model: Harbor, sandbox, agent and verifier.

    .venv-agent/bin/python benchmarks/agent_server.py [--trials 10] [--concurrent 8] [--json]

It starts an agent server of its own and a model endpoint that answers at once from a script. With
a Python that cannot run an agent server, the server has that of `.venv-agent`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from miles_core.agent_server.client import AgentServerClient
from miles_core.agent_server.interpreter import check_interpreter
from miles_core.agent_server.protocol import TrialRequest
from miles_core.errors import UserError

TASK = {
    "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 60.0\n[environment]\n'
    'workdir = "/app"\nnetwork_mode = "no-network"\nmemory_mb = 512\nstorage_mb = 64\n',
    "instruction.md": "Write 42 into /app/answer.txt\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\n"
    '[ "$(cat /app/answer.txt 2>/dev/null)" = 42 ] && r=1 || r=0\n'
    "echo $r > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho 42 > /app/answer.txt\n",
}
COMMANDS = ["echo 42 > /app/answer.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
TYPED = [
    {"commands": [{"keystrokes": COMMANDS[0] + "\n", "duration": 0}], "task_complete": True},
    {"commands": [], "task_complete": True},
]
EXPECTED = {"nop": 0.0, "oracle": 1.0, "mini-swe-agent": 1.0, "terminus-2": 1.0}


def answer(turn: int, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What the model says: a call of `bash` where there are tools, else JSON for terminus-2."""
    if "tools" not in body:
        said = {"analysis": "", "plan": "", **TYPED[min(turn, len(TYPED) - 1)]}
        return {"role": "assistant", "content": json.dumps(said)}, "stop"
    arguments = json.dumps({"command": COMMANDS[min(turn, len(COMMANDS) - 1)]})
    function = {"name": "bash", "arguments": arguments}
    call = {"id": f"c{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"


class Model(BaseHTTPRequestHandler):
    """Answers at once with the action whose turn it is."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message, reason = answer(turn, body)
        data = json.dumps({"choices": [{"message": message, "finish_reason": reason}]})
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *args: Any) -> None:
        return


def cpu_s(root: int) -> float:
    """CPU seconds of a process, of all below it, and of what these have waited for."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                stats[int(entry.name)] = stat.rpartition(")")[2].split()
    family = {root}
    while found := {pid for pid, stat in stats.items() if int(stat[1]) in family} - family:
        family |= found
    ticks = sum(int(tick) for pid in family & set(stats) for tick in stats[pid][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(
    url: str, server: int, model: str, trials: int, concurrent: int
) -> dict[str, Any]:
    """Seconds per trial of each agent, one after the other and `concurrent` at once.

    CPU seconds are those of the process `server` and its sandboxes, of a trial in the mean; they
    tell of the cost even when the machine has other work.
    """
    report: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    async with AgentServerClient(url) as client:

        async def one(agent: str, number: int) -> tuple[float, Any]:
            request = TrialRequest(instance_id="bench", agent_name=agent, base_url=model)
            began = time.monotonic()
            result = await client.run(f"{agent}-{number}-{time.time_ns()}", request, 300)
            if result.reward != EXPECTED[agent]:
                raise RuntimeError(f"{agent} ended with {result.verdict}")
            return time.monotonic() - began, result.agent_metrics

        for agent in EXPECTED:
            first = await one(agent, -1)
            cpu = cpu_s(server)
            pairs = [await one(agent, number) for number in range(trials)]
            seconds = [pair[0] for pair in pairs]
            cpu_between = cpu_s(server)
            began = time.monotonic()
            await asyncio.gather(*(one(agent, number) for number in range(concurrent)))
            wall = time.monotonic() - began
            cpu_after = cpu_s(server)
            phases = ("env_setup_time", "agent_setup_time", "agent_run_time", "eval_time")
            report[agent] = {
                "trials": trials,
                "first_s": round(first[0], 4),
                "median_s": round(statistics.median(seconds), 4),
                "max_s": round(max(seconds), 4),
                "cpu_s": round((cpu_between - cpu) / trials, 4),
                **{
                    f"median_{phase}": statistics.median(getattr(pair[1], phase) for pair in pairs)
                    for phase in phases
                },
                "concurrent": concurrent,
                "concurrent_wall_s": round(wall, 4),
                "concurrent_cpu_s": round((cpu_after - cpu_between) / concurrent, 4),
            }
    return report


def server_python() -> str:
    """A Python that can run the agent server; raises UserError."""
    try:
        check_interpreter()
    except UserError:
        from miles_core.cluster.local_agent import agent_python

        return str(agent_python(None))
    return sys.executable


def run(trials: int, concurrent: int) -> dict[str, Any]:
    """Start the server and the model, measure, end both; raises UserError."""
    python = server_python()
    model = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=model.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, content in TASK.items():
            path = root / "tasks" / "bench" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        ready = root / "ready.json"
        command = [python, "-m", "miles_core.agent_server.main", "--port", "0"]
        command += ["--ready-file", str(ready), "--tasks-dir", str(root / "tasks")]
        command += ["--trials-dir", str(root / "trials"), "--max-concurrent", str(concurrent)]
        began = time.monotonic()
        env = {key: value for key, value in os.environ.items() if key != "HARBOR_ADMIN_SECRET"}
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
        try:
            while not ready.exists():
                if server.poll() is not None:
                    raise RuntimeError(f"the agent server ended with {server.returncode}")
                time.sleep(0.02)
            start_s = round(time.monotonic() - began, 3)
            url = json.loads(ready.read_text())["url"]
            endpoint = f"http://127.0.0.1:{model.server_port}/v1"
            report = asyncio.run(measure(url, server.pid, endpoint, trials, concurrent))
        finally:
            server.terminate()
            server.wait()
            model.shutdown()
            model.server_close()
    return {"server_start_s": start_s, **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=10, help="trials in sequence (%(default)s)")
    parser.add_argument("--concurrent", type=int, default=8, help="trials at once (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    try:
        report = run(args.trials, args.concurrent)
    except UserError as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"server start {report['server_start_s']} s, load {report['load_average']:.1f}")
    for agent in EXPECTED:
        row = report[agent]
        print(
            f"{agent:15} first {row['first_s']:.3f} s, median {row['median_s']:.3f} s "
            f"(agent {row['median_agent_setup_time'] + row['median_agent_run_time']:.3f} s), "
            f"max {row['max_s']:.3f} s, CPU {row['cpu_s']:.2f} s; {row['concurrent']} at once "
            f"{row['concurrent_wall_s']:.2f} s, CPU {row['concurrent_cpu_s']:.2f} s each"
        )


if __name__ == "__main__":
    main()
