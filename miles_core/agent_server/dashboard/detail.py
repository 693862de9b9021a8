"""One trial in full: what was asked, how it went, what was printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from miles_core.agent_server.dashboard.clean import Cleaner
from miles_core.agent_server.dashboard.files import Folder
from miles_core.agent_server.dashboard.trajectory import (
    FILES,
    Live,
    live_trajectory,
    read_trajectory,
)

OUTPUT_LIMIT = 64 << 10
"""Bytes of one output, from its end, that are shown."""

RESULT_LIMIT = 4 << 20
MOST_STEPS = 20
MOST_OUTPUTS = 6

APART = ".agent"
"""Where an agent of this host keeps its files while it works; see `agents/apart.py`."""
VERIFIER_OUTPUTS = ("test-stdout.txt", "test-stderr.txt")
PHASES = {
    "env_setup_time": "environment",
    "agent_setup_time": "agent_setup",
    "agent_run_time": "agent",
    "eval_time": "verifier",
}


class TrialFiles:
    """The files of one trial, `TRIALS_DIR/<id>` and Harbor's directory in it."""

    def __init__(self, trials_dir: Path, trial_id: str) -> None:
        self.folder = Folder(trials_dir / trial_id)
        self.harbor = ("harbor", trial_id)
        names = self.folder.names(*self.harbor, "steps")[:MOST_STEPS]
        self.places: list[tuple[str | None, tuple[str, ...]]] = [(None, self.harbor)]
        self.places += [(name, (*self.harbor, "steps", name)) for name in names]

    def stamps(self) -> list[Any]:
        """What changes whenever an answer about this trial would."""
        paths: list[tuple[str, ...]] = [("started.json",), ("result.json",)]
        paths += [(*self.harbor, name) for name in ("trial.log", "exception.txt")]
        for _, place in self.places:
            paths += [(*place, "verifier", name) for name in VERIFIER_OUTPUTS]
            paths += [(*self._agent(place), name) for name in self._agent_files(place)]
        return [(path, self.folder.stamp(*path)) for path in paths]

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object of the trial's own, or an empty one."""
        data = self.folder.read(name, limit=RESULT_LIMIT, whole=True)
        try:
            found = orjson.loads(data) if data is not None else {}
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    def outputs(self, cleaner: Cleaner) -> dict[str, list[dict[str, Any]]]:
        """Ends of what the verifier, the agent and Harbor printed, by the three of them."""
        verifier, agent = [], []
        for step, place in self.places:
            for name in VERIFIER_OUTPUTS:
                verifier += self._output(cleaner, step, name, *place, "verifier", name)
            for name in self._agent_files(place):
                if name.endswith((".txt", ".log")):
                    agent += self._output(cleaner, step, name, *self._agent(place), name)
        log = []
        for name in ("exception.txt", "trial.log"):
            log += self._output(cleaner, None, name, *self.harbor, name)
        return {"verifier": verifier, "agent": agent[:MOST_OUTPUTS], "log": log}

    def trajectories(self, cleaner: Cleaner, live: Live | None) -> list[dict[str, Any]]:
        """The trajectory of each step that has one, `step` being None for a task of one step.

        What an agent has done so far comes from `live` until its own file is here.
        """
        found = []
        for step, place in self.places:
            made = read_trajectory(self.folder, self._agent(place), cleaner)
            if made["format"] or made["problem"]:
                found.append({"step": step and cleaner.short(step, 200), **made})
        if live is not None and live.runs > len(found):
            found.append({"step": None, **live_trajectory(live, cleaner)})
        return found

    def _agent(self, place: tuple[str, ...]) -> tuple[str, ...]:
        """Where an agent's files are: apart while one works on this host."""
        apart = (*place, APART)
        return apart if self.folder.names(*apart) else (*place, "agent")

    def _agent_files(self, place: tuple[str, ...]) -> list[str]:
        names = self.folder.names(*self._agent(place))
        texts = [name for name in names if name.endswith((".txt", ".log"))]
        return [*FILES, *texts[:MOST_OUTPUTS]]

    def _output(
        self, cleaner: Cleaner, step: str | None, name: str, *path: str
    ) -> list[dict[str, Any]]:
        found = self.folder.tail(*path, limit=OUTPUT_LIMIT)
        if found is None or not found.size:
            return []
        made: dict[str, Any] = {"name": cleaner.short(name, 200), "text": cleaner.text(found.text)}
        made["step"] = cleaner.short(step, 200) if step else None
        return [{**made, "size": found.size, "cut": found.cut}]


def detail(
    files: TrialFiles,
    row: dict[str, Any],
    request: dict[str, Any] | None,
    live: Live | None,
    cleaner: Cleaner,
) -> dict[str, Any]:
    """The answer about one trial; `row` is its line of the list. Of a live one, `request` is what
    may be shown of its request and `live` the conversation of its agent."""
    result, started = files.object("result.json"), files.object("started.json")
    verdict = result.get("verdict") if row["state"] == "ended" else None
    metrics = result.get("agent_metrics") if row["state"] == "ended" else None
    return {
        "trial": row,
        "kept": bool(started or result),
        "request": cleaner.value(request if request is not None else started.get("request", {})),
        "verdict": cleaner.value(verdict),
        "exit_status": cleaner.value(result.get("exit_status")) if verdict else None,
        "metrics": cleaner.value(metrics),
        "phases": phases(row, metrics if isinstance(metrics, dict) else {}),
        "trajectories": files.trajectories(cleaner, live),
        "outputs": files.outputs(cleaner),
    }


def phases(row: dict[str, Any], metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds by phase of an ended trial: in the queue, in each phase, and in the rest."""
    total = metrics.get("total_time")
    if not isinstance(total, (int, float)):
        return []
    known = {
        name: float(metrics[key])
        for key, name in PHASES.items()
        if isinstance(metrics.get(key), (int, float))
    }
    known["other"] = max(0.0, total - sum(known.values()))
    if row["created_at"] is not None and row["ended_at"] is not None:
        waited = row["ended_at"] - row["created_at"] - total
        known = {"queued": max(0.0, waited), **known}
    return [{"name": name, "seconds": round(seconds, 3)} for name, seconds in known.items()]
