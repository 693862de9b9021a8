"""The learning curve of one or more runs as a picture, and whether the reward rose.

    .venv/bin/python benchmarks/learn_curve.py runs/learn-s0 runs/learn-s1 --output docs/learn.png

Reads the run directories and nothing else. Exit status 0 only when, in each run, the mean reward
of the last five steps is at least `--rise` above that of the first five and the success on
held-out rows rose too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from miles_core.runs.directory import find_run
from miles_core.runs.journal import read
from miles_core.runs.metrics import read_metrics

SPAN = 5


def summarise(path: str) -> dict[str, Any]:
    """Rewards by step, held-out success by trained steps, and the time of a run."""
    run = find_run(path)
    metrics = read_metrics(run.metrics)
    rewards = [m["reward_mean"] for m in metrics if m["source"] == "rollout"]
    held_out = {m["step"]: m["reward_mean"] for m in metrics if m["source"] == "eval"}
    trained = [
        e["time"] for e in read(run.journal) if e["event"] in ("run_started", "step_trained")
    ]
    first, last = rewards[:SPAN], rewards[-SPAN:]
    return {
        "run": run.path.name,
        "steps": len(rewards),
        "rewards": rewards,
        "first": sum(first) / len(first),
        "last": sum(last) / len(last),
        "held_out": held_out,
        "minutes": (trained[-1] - trained[0]) / 60,
    }


def rose(summary: dict[str, Any], rise: float) -> bool:
    """Whether a run shows learning on its own rows and on the held-out ones."""
    held_out = [summary["held_out"][step] for step in sorted(summary["held_out"])]
    gained = len(held_out) > 1 and held_out[-1] > held_out[0]
    return summary["last"] - summary["first"] >= rise and gained


def draw(summaries: list[dict[str, Any]], output: Path) -> None:
    """Reward of each step (faint), its mean over five steps, and held-out success (dots)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for index, summary in enumerate(summaries):
        colour = f"C{index}"
        rewards = summary["rewards"]
        smooth = [
            sum(rewards[max(0, i - SPAN + 1) : i + 1]) / min(i + 1, SPAN)
            for i in range(len(rewards))
        ]
        axes.plot(rewards, color=colour, alpha=0.3, linewidth=1)
        axes.plot(smooth, color=colour, linewidth=2, label=f"{summary['run']}: mean of 5 steps")
        steps = sorted(summary["held_out"])
        values = [summary["held_out"][step] for step in steps]
        axes.plot(steps, values, "o--", color=colour, label=f"{summary['run']}: held-out tasks")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--output", type=Path, help="picture to write (PNG)")
    parser.add_argument("--rise", type=float, default=0.25, help="least rise of the mean reward")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    summaries = [summarise(path) for path in args.runs]
    if args.output is not None:
        draw(summaries, args.output)
    if args.json:
        print(json.dumps(summaries, indent=1))
    else:
        for s in summaries:
            held = ", ".join(f"{v:.2f} after {k} steps" for k, v in sorted(s["held_out"].items()))
            print(
                f"{s['run']}: {s['steps']} steps in {s['minutes']:.1f} min, reward "
                f"{s['first']:.3f} -> {s['last']:.3f} (first and last {SPAN}); held-out {held}"
            )
    return 0 if all(rose(summary, args.rise) for summary in summaries) else 1


if __name__ == "__main__":
    sys.exit(main())
