"""Live progress of a run in the terminal, and its closing summary; both read the journal only."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from miles_core.runs.directory import RunDir
from miles_core.runs.fold import RunState, fold
from miles_core.runs.journal import Tail, read
from miles_core.runs.status import eta_s

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_INTERVAL_S = 0.5


def duration(seconds: float) -> str:
    """Seconds as `12 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """The last `width` values as bars from the least (or 0) to the greatest; a gap is a dot."""
    shown = list(values)[-width:]
    numbers = [v for v in shown if v is not None]
    low = min([0.0, *numbers])
    span = max([1e-9, *(v - low for v in numbers)])
    return "".join(
        "·" if v is None else _BARS[round((v - low) / span * (len(_BARS) - 1))] for v in shown
    )


def event_line(event: dict[str, Any], state: RunState) -> str | None:
    """One plain line for an event that a person wants to see, or None."""
    kind = event["event"]
    if kind == "run_started":
        return f"attempt {event['attempt']}: step {event['from_step']} of {event['steps_total']}"
    if kind == "stage" and event["state"] == "started":
        step = event.get("step")
        return f"{event['name']} ..." if step is None else f"step {step}: {event['name']} ..."
    if kind == "tasks_checked":
        return tasks_line(event)
    if kind == "stage" and event["state"] == "skipped":
        return f"{event['name']}: unchanged, skipped"
    if kind == "trial_ended" and event["kind"] == "no_verdict":
        return f"trial {event['trial_id']}: no verdict ({event['cause']})"
    if kind == "group_dropped":
        return f"group {event['group_id']} dropped: {event['reason']}"
    if kind == "step_trained":
        reward = event["metrics"].get("reward_mean")
        told = "no reward" if reward is None else f"mean reward {reward:.3f}"
        return f"step {event['step']} trained ({state.steps_done}/{state.steps_total}): {told}"
    if kind == "alarm":
        return f"ALARM {event['kind']}: {event.get('detail', '')}"
    if kind == "run_ended":
        detail = event.get("detail")
        return f"run {event['state']}" + (f": {detail}" if detail else "")
    return None


def tasks_line(event: dict[str, Any]) -> str:
    """How far the checks of the tasks are."""
    text = f"{event['done']} of {event['total']} tasks checked"
    if event["refused"]:
        text += f", {event['refused']} not admitted"
    if event["seconds_left"] is not None:
        text += f", about {duration(event['seconds_left'])} left"
    return text


class LiveProgress:
    """Shows the progress of a run while a `with` block works on it.

    A thread follows the journal. On a terminal one block is redrawn in place; elsewhere each
    event that matters becomes a line. Events from before the block are counted but not shown.
    The run directory need not exist yet. A fault of the display never disturbs the work: it ends
    the display and is told when the block ends.
    """

    def __init__(self, run_dir: RunDir | str | Path, stream: TextIO | None = None) -> None:
        self.run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
        self._stream = stream if stream is not None else sys.stdout
        self._tail = Tail(self.run.journal)
        self._state = RunState()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="live-progress", daemon=True)
        self._fault: Exception | None = None
        self._tasks = ""
        self._began = time.time()

    def __enter__(self) -> LiveProgress:
        for event in self._tail.new():
            self._state.apply(event)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._fault is not None:
            print(f"the progress display ended early: {self._fault!r}", file=sys.stderr)

    def _follow(self) -> None:
        try:
            if self._stream.isatty():
                self._draw()
            else:
                self._print_lines()
        except Exception as fault:  # told in __exit__
            self._fault = fault

    def _new_events(self) -> list[tuple[dict[str, Any], str | None]]:
        told = []
        for event in self._tail.new():
            self._state.apply(event)
            if event["event"] == "tasks_checked":
                self._tasks = tasks_line(event)
            told.append((event, event_line(event, self._state)))
        return told

    def _print_lines(self) -> None:
        while True:
            last_round = self._stop.wait(_INTERVAL_S)
            for event, line in self._new_events():
                if line is not None:
                    since = max(0.0, event["time"] - self._began)
                    print(f"[{since:7.1f} s] {line}", file=self._stream, flush=True)
            if last_round:
                return

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                last_round = self._stop.wait(_INTERVAL_S)
                for event, line in self._new_events():
                    if line is not None and event["event"] in ("alarm", "group_dropped"):
                        live.console.print(line, style="yellow", markup=False)
                live.update(self._block(), refresh=True)
                if last_round:
                    return

    def _block(self) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table

        state, now = self._state, time.time()
        grid = Table.grid(padding=(0, 2))
        stage = state.stage or (state.state if state.state != "new" else "preparing")
        grid.add_row("stage", stage)
        if stage == "agent_server" and self._tasks:
            grid.add_row("tasks", self._tasks)
        if state.steps_total is not None:
            filled = round(24 * state.steps_done / max(1, state.steps_total))
            bar = "█" * filled + "░" * (24 - filled)
            grid.add_row("steps", f"{bar} {state.steps_done}/{state.steps_total}")
        if state.trials:
            grid.add_row("trials", ", ".join(f"{n} {k}" for k, n in sorted(state.trials.items())))
        rewards = state.reward_mean
        if rewards:
            last = rewards[-1]
            told = "-" if last is None else f"{last:.3f}"
            grid.add_row("reward", f"{sparkline(rewards)} {told}")
        left = eta_s(state, now)
        grid.add_row("time", duration(now - self._began))
        if left is not None:
            grid.add_row("ends in", f"about {duration(left)}")
        if state.alarms:
            grid.add_row("alarm", f"{state.alarms[-1]['kind']}: {state.alarms[-1]['detail']}")
        return Panel(grid, title=self.run.path.name, title_align="left", expand=False)


def summary(run_dir: RunDir | str | Path) -> str:
    """Closing summary: state, reward by step, time by stage, and the path as its last line."""
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    state = fold(read(run.journal))
    lines = ["", f"run {state.state}" + (f": {state.detail}" if state.detail else "")]
    rewards = state.reward_mean
    if rewards:
        lines += ["", "step  reward_mean"]
        shown = list(enumerate(rewards))
        if len(shown) > 20:
            lines.append(f"...   ({len(shown) - 20} earlier steps are in metrics.jsonl)")
            shown = shown[-20:]
        lines += [f"{i:>4}  {'-' if r is None else format(r, '.4f')}" for i, r in shown]
    if state.stage_seconds:
        lines += ["", "stage         seconds"]
        lines += [f"{name:<12}  {s:7.1f}" for name, s in state.stage_seconds.items()]
    if state.verdicts:
        lines += ["", "verdicts: " + ", ".join(f"{n} {c}" for c, n in state.verdicts.most_common())]
    return "\n".join([*lines, "", str(run.path)])
