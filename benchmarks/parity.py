"""How far logits and gradients are from transformers', in float32.

    .venv/bin/python benchmarks/parity.py [--seeds 20] [--family qwen3_moe ...] [--hf DIR ...]

Random small models of every family, over the fields that decide what is computed (head counts and
sizes, rotary types, routers, shared experts, biases, tied embeddings; `random_configs.py` of the
tests), each weight random; or the models of Hugging Face directories. Logits differ by a share of
the largest logit, a gradient by a share of the largest value of its tensor. Exit status 1 when one
is above 1e-4 or 1e-3, or when an export is not its source bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "modeling"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from parity_helpers import Parity, measure, random_model
from random_configs import FAMILIES, random_config
from transformers.utils.logging import disable_progress_bar

from miles_core.modeling import parallel

LOGITS, GRADIENTS = 1e-4, 1e-3
SIZES = [64, 1, 37, 100]


def of_family(family: str, seeds: int) -> Iterator[Parity]:
    """One measurement for each seed."""
    for seed in range(seeds):
        name, values = random_config(family, seed)
        with tempfile.TemporaryDirectory() as folder:
            yield measure(random_model(Path(folder) / "hf", name, values, seed), SIZES, seed)


def summary(name: str, found: list[Parity]) -> dict[str, object]:
    """The worst of several measurements."""
    worst = max(found, key=lambda parity: parity.gradients)
    return {
        "model": name,
        "configurations": len(found),
        "logits": max(parity.logits for parity in found),
        "gradients": worst.gradients,
        "worst_gradient": worst.worst_gradient,
        "exported_alike": all(parity.exported_alike for parity in found),
        "within": all(p.logits <= LOGITS and p.gradients <= GRADIENTS for p in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="configurations of each family (20)")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="default: all")
    parser.add_argument("--hf", action="append", type=Path, help="a directory instead")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    disable_progress_bar()
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        if args.hf:
            rows = (summary(path.name, [measure(path, SIZES)]) for path in args.hf)
        else:
            wanted = args.family or list(FAMILIES)
            rows = (summary(name, list(of_family(name, args.seeds))) for name in wanted)
        good = True
        for row in rows:
            good &= bool(row["within"] and row["exported_alike"])
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{row['model']:<24} {row['configurations']:>4} configurations   logits "
                    f"{row['logits']:.1e}   gradients {row['gradients']:.1e} "
                    f"({row['worst_gradient']})   export "
                    f"{'equal' if row['exported_alike'] else 'DIFFERS'}",
                    flush=True,
                )
    finally:
        parallel.stop()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
