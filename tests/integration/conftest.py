"""Whole runs of the command line, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MILES = Path(sys.executable).with_name("miles")

# The recipe of the example model without its warm start: every part of the chain runs, quickly.
RECIPE = """
seed = 0
tasks_dir = "{root}/examples/tasks"
agent_config = "{root}/examples/agents/terse.yaml"
[shape]
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 32
intermediate_size = 128
[warm_start]
batch_size = 4
lr = 1e-3
lr_warmup_steps = 1
max_steps = 2
target_success = 0.35
"""


@dataclass
class Runs:
    """A folder of runs, and the command that makes them."""

    directory: Path
    recipe: Path

    def start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        """`miles train` for the run `name`, as a process of its own."""
        command = [str(MILES), "train", "--preset", "quickstart", "--run-name", name]
        command += ["--runs-dir", str(self.directory), "--model-recipe", str(self.recipe)]
        # One turn a trial is enough for the chain, and short answers keep it quick.
        command += ["--max-turns", "2", "--rollout-max-response-len", "32", *flags]
        with (self.directory / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen[bytes], timeout_s: float = 400) -> int:
        """Wait for a command; on a time-out it is ended and the test fails."""
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            raise

    def complete(self, name: str, *flags: str) -> None:
        """`miles train` up to its good end, which leaves no process behind."""
        assert self.finish(self.start(name, *flags)) == 0, self.output(name)[-3000:]
        assert self.status(name)["state"] == "completed"
        assert self.left(name) == []

    def miles(self, *argv: str) -> Any:
        """What another command answers with --json."""
        done = subprocess.run([str(MILES), *argv, "--json"], capture_output=True)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        return json.loads(done.stdout)

    def trained(self, name: str) -> list[dict[str, Any]]:
        """The metrics of each step that was trained, in the order of the journal."""
        return [{"step": e["step"], **e["metrics"]} for e in self.events(name, "step_trained")]

    def output(self, name: str) -> str:
        return (self.directory / f"{name}.out").read_text()

    def status(self, name: str) -> dict:
        """`miles status --json` of a run."""
        command = [str(MILES), "status", str(self.directory / name), "--json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def events(self, name: str, kind: str) -> list[dict]:
        """The run's journal events of one kind."""
        path = self.directory / name / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] == kind]

    def wait(
        self, what: Callable[[], object], timeout_s: float = 300, every_s: float = 0.1
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(every_s)

    def left(self, name: str) -> list[str]:
        """Processes that have to do with a run, by command line or environment."""
        mark = str(self.directory / name).encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes()
                belongs = mark in command or mark in (folder / "environ").read_bytes()
            except OSError:
                continue
            if belongs and int(folder.name) != os.getpid():
                found.append(f"{folder.name}: {command.replace(bytes(1), b' ').decode()[:150]}")
        return found


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    directory = tmp_path_factory.mktemp("runs")
    recipe = directory / "untrained.toml"
    recipe.write_text(RECIPE.format(root=ROOT))
    return Runs(directory, recipe)
