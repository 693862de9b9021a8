"""What the session server costs: turns per second, latency, memory, and each part of a turn.

    python benchmarks/sessions.py [--only turns routing costs health] [--repeats 3] [--json]

Starts a real session server (one worker), an engine that answers at once and a process of agents,
all on loopback.

turns    sessions side by side, each turn as soon as the last is answered
routing  the same with routing data for each token
costs    the parts of one turn, in this process, against the length of the history
health   `/health` beside 1,000 idle and 64 active sessions: as fast as they can, then
         ("paced") with a second between the turns of each, then 4 with messages of 0.4 MB

Each phase but `costs` is repeated with a new server. The machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from session_costs import TURNS, make_corpus, turn_costs
from session_round import drive

# Miles' session server on two such cores, 64 + 64 tokens a turn.
ANCHORS: dict[str, dict[str, float]] = {
    "turns": {"turns_per_s": 63, "p50_ms": 330, "p99_ms": 1900},
    "routing": {"turns_per_s": 10, "p99_ms": 7700, "peak_mib": 14.7 * 1024},
}
TARGETS: dict[str, dict[str, float]] = {
    "turns": {"turns_per_s": 5 * 63, "p99_ms": 1900 / 5},
    "routing": {"turns_per_s": 10 * 10, "peak_mib": 1.5 * 1024},
    "health": {"p99_ms": 50},
}


def spread(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Least, median and greatest of each figure."""
    found = {}
    for name in rounds[0]:
        values = [row[name] for row in rounds]
        three = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        found[name] = {key: round(value, 2) for key, value in three.items()}
    return found


def at_turn(row: dict[str, float], turn: float) -> float:
    """A cost at a turn between those that were measured, linearly."""
    return float(np.interp(turn, TURNS, [row[f"turn {turns} ms"] for turns in TURNS]))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All wanted phases; each round has a server of its own."""
    many = {"sessions": args.sessions, "turns": args.turns}
    health = {"sessions": 64, "turns": args.health_turns, "idle_sessions": args.idle}
    phases: dict[str, tuple[int, dict[str, Any]]] = {
        "turns": (0, many),
        "routing": (args.row_bytes, many),
        "health": (0, health),
        "health, paced": (0, {**health, "pause_s": 1.0, "turns": 10}),
        "health, long texts": (0, {**health, "sessions": 4, "turns": 5, "repeat": 2000}),
    }
    load_before, results = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        corpus = make_corpus(scratch, args.tokenizer)
        for name, (row_bytes, load) in phases.items():
            kind = name.split(",")[0]
            if kind in args.only:
                rounds = range(args.repeats)
                found = [drive(corpus, row_bytes, load, scratch, kind == "health") for _ in rounds]
                results[name] = spread(found)
        costs = turn_costs(corpus, scratch, args.cost_repeats) if "costs" in args.only else {}
    if costs and "turns" in results:
        whole = results["turns"]["worker_cpu_ms_per_turn"]["median"]
        parts = at_turn(costs["all"], args.turns / 2)
        named = {"HTTP, event loop": whole - parts, "whole": whole}
        costs[f"turn {args.turns // 2}"] = {k: round(v, 4) for k, v in named.items()}
    return {
        "benchmark": "sessions",
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "sessions": args.sessions,
        "turns": args.turns,
        "repeats": args.repeats,
        "anchors": ANCHORS,
        "targets": TARGETS,
        "results": results,
        "costs": costs,
    }


def show(report: dict[str, Any]) -> None:
    """The report as a table."""
    print(
        f"{report['cores']} cores ({report['cpu']}), load average before and after "
        f"{report['load_average']}; {report['repeats']} rounds: median (min to max)"
    )
    for phase, rows in report["results"].items():
        print(f"{phase}:")
        kind = phase.split(",")[0]
        for name, row in rows.items():
            beside = "".join(
                f"  {title} {values[kind][name]:g}"
                for title, values in (("Miles", ANCHORS), ("target", TARGETS))
                if name in values.get(kind, {})
            )
            span = f"({row['min']:.2f} to {row['max']:.2f})"
            print(f"  {name:24} {row['median']:10.2f} {span:24}{beside}".rstrip())
    if report["costs"]:
        print("costs of one turn:")
    for part, row in report["costs"].items():
        print(f"  {part:20}" + "".join(f"{name:>16} {value:<8g}" for name, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    every = ["turns", "routing", "costs", "health"]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="phases to run")
    parser.add_argument("--sessions", type=int, default=32, help="sessions side by side")
    parser.add_argument("--turns", type=int, default=50, help="turns of each")
    parser.add_argument("--idle", type=int, default=1000, help="idle sessions beside /health")
    parser.add_argument("--health-turns", type=int, default=120, help="turns beside /health")
    parser.add_argument("--row-bytes", type=int, default=1000, help="routing data of a token")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each phase")
    parser.add_argument("--cost-repeats", type=int, default=200, help="times that a part is timed")
    parser.add_argument(
        "--tokenizer", type=Path, help="a checkpoint; default: one made on the spot"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    report = run(args)
    print(json.dumps(report)) if args.json else show(report)


if __name__ == "__main__":
    main()
