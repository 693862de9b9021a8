"""Speed of `miles data convert`: MB/s of input on one core, against a plain JSON loop.

    python benchmarks/data.py [--mb 200] [--repeats 5] [--input FILE] [--json]

Both convert the same synthetic file of rows like SWE-bench's (patches with escapes, carriage
returns, nesting, nulls), or the rows of a file repeated under ids of their own. They take turns,
and each round gives one ratio. Each run has a process of its own, so that its peak memory is its
own; the time of the conversion alone is taken, with its writing. Ours also waits for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TEXT = """def return self the separability_matrix does not compute "nested" models \\d+\\s
é λ — assert np.array([[True, False]]) \t ''' {} <div> // # None raise ValueError('bad')"""
_WORDS = _TEXT.split()


def make_input(path: Path, megabytes: float) -> int:
    """Write rows of a few kilobytes each until the file has that size; returns the rows."""
    rng = random.Random(0)
    pool = [_text(rng, rng.randint(20, 400)) for _ in range(400)]
    size = rows = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        while size < megabytes * 1e6:
            line = json.dumps(_row(rng, pool, rows), ensure_ascii=rows % 2 == 0) + "\n"
            size += file.write(line)
            rows += 1
    return rows


def _text(rng: random.Random, words: int) -> str:
    parts = []
    for index in range(words):
        parts.append(rng.choice(_WORDS))
        if index % 9 == 8:
            parts.append(rng.choice(("\n+", "\r\n-", "\n ")))
    return " ".join(parts)


def _row(rng: random.Random, pool: list[str], index: int) -> dict[str, Any]:
    return {
        "repo": "org/pkg",
        "instance_id": f"org__pkg-{index}",
        "base_commit": f"{rng.getrandbits(160):040x}",
        "patch": rng.choice(pool),
        "test_patch": rng.choice(pool) + rng.choice(pool),
        "problem_statement": rng.choice(pool),
        "hints_text": rng.choice((None, "", rng.choice(pool))),
        "FAIL_TO_PASS": json.dumps([f"tests/test_{i}.py::test_x[{i}]" for i in range(8)]),
        "environment": {"cpus": 1, "limits": {"memory_mb": 2048.5, "gpu": None}, "ports": [80, 1]},
    }


def _ours(source: str, output: str) -> None:
    from miles_core.data.convert import ConvertOptions, convert

    convert(ConvertOptions(input=source, output=Path(output)))


def _plain(source: str, output: str) -> None:
    with open(source, encoding="utf-8") as lines, open(output, "w", encoding="utf-8") as out:
        for line in lines:
            row = json.loads(line)
            added = {"agent_name": "mini-swe-agent", "split": "train"}
            made = {"prompt": row["problem_statement"], "metadata": {**added, **row}}
            out.write(json.dumps(made) + "\n")


def _measure(name: str, source: str, output: str) -> None:
    """Child process: run one converter and print its figures."""
    if name == "ours":
        import miles_core.data.convert  # noqa: F401 - the import is not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    {"ours": _ours, "plain": _plain}[name](source, output)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = os.path.getsize(source) / 1e6
    print(
        json.dumps(
            {
                "mb_per_s": round(megabytes / wall, 1),
                "mb_per_cpu_s": round(megabytes / cpu, 1),
                "seconds": round(wall, 3),
                "peak_rss_mb": round(peak / 1024, 1),
                "rss_growth_mb": round((peak - before) / 1024, 1),
            }
        )
    )


def _same_rows(first: Path, second: Path) -> bool:
    with open(first, "rb") as a, open(second, "rb") as b:
        return all(json.loads(x) == json.loads(y) for x, y in zip(a, b, strict=True))


def repeat_rows(rows: Path, path: Path, megabytes: float) -> int:
    """Repeat the rows of a JSON-lines file until that size; returns the rows.

    Each copy of a row gets `instance_id` and `problem_statement` of its own if it has none, so
    that both converters find them at the top.
    """
    with open(rows, encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines if line.strip()]
    size = count = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        while size < megabytes * 1e6:
            row = found[count % len(found)]
            own = {"instance_id": f"row-{count}"}
            if not isinstance(row.get("problem_statement"), str):
                own["problem_statement"] = f"Do number {count}."
            size += file.write(json.dumps({**row, **own}) + "\n")
            count += 1
    return count


def _once(name: str, source: Path, output: Path) -> dict[str, Any]:
    output.unlink(missing_ok=True)
    child = [sys.executable, __file__, "--child", name, str(source), str(output)]
    done = subprocess.run(child, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(megabytes: float, repeats: int, rows: Path | None) -> dict[str, Any]:
    """Figures of both converters by turns: medians, and the spread of the rounds' ratios."""
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "input.jsonl"
        count = repeat_rows(rows, source, megabytes) if rows else make_input(source, megabytes)
        size = round(source.stat().st_size / 1e6, 1)
        outputs = {name: Path(folder) / f"{name}.jsonl" for name in ("ours", "plain")}
        for _ in range(repeats):
            rounds.append({name: _once(name, source, path) for name, path in outputs.items()})
        same = _same_rows(outputs["ours"], outputs["plain"])
    ratios = [r["plain"]["seconds"] / r["ours"]["seconds"] for r in rounds]
    result: dict[str, Any] = {
        "input_mb": size,
        "rows": count,
        "same_rows": same,
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }
    for name in outputs:
        runs = [r[name] for r in rounds]
        result[name] = {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=float, default=200, help="size of the input (default: 200)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of both (default: 5)")
    parser.add_argument(
        "--input", type=Path, help="JSON lines to repeat (default: made-up rows like SWE-bench's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _measure(*args.child)
        return 0
    result = run(args.mb, args.repeats, args.input)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['rows']} rows, {result['input_mb']} MB, medians of {args.repeats} rounds")
        for name in ("ours", "plain"):
            found = result[name]
            print(
                f"{name:6} {found['mb_per_s']:7.1f} MB/s, peak {found['peak_rss_mb']:.0f} MB "
                f"({found['rss_growth_mb']:.0f} MB of it in the conversion)"
            )
        spread = f"{result['ratio_min']} to {result['ratio_max']}"
        print(f"ratio {result['ratio']} ({spread}), same rows: {result['same_rows']}")
    return 0 if result["same_rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
