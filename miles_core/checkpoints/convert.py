"""Hugging Face directories to torch_dist directories and back.

python -m miles_core.checkpoints.convert HF OUT [--json]
python -m miles_core.checkpoints.convert --export TORCH_DIST OUT_HF [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from miles_core.checkpoints import manifest
from miles_core.checkpoints.compare import (
    LOGIT_TOLERANCE,
    ConversionError,
    cut_short,
    logit_difference,
    logits_fit,
    telling_layers,
    values_of,
)
from miles_core.checkpoints.export import export_to_hf
from miles_core.checkpoints.fingerprint import source_fingerprint
from miles_core.checkpoints.layout import HF_DIR, copy_hf_files
from miles_core.checkpoints.stream import PROGRESS_FILE, Busy, Report, Stream, unfinished

if TYPE_CHECKING:
    from miles_core.modeling.shard_map import ShardMap

__all__ = [
    "LOGIT_TOLERANCE",
    "Conversion",
    "ConversionError",
    "convert_to_torch_dist",
    "converted",
    "export_to_hf",
]

KIND = "converted"
WORKERS = 4  # more than cores: some wait for the disk

Check = Literal["auto", "logits", "tensors"]


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion. All tensors were compared with the source, bit for bit. `checked`:
    "logits" when logits were too (`logit_difference`, a share of the largest logit), of the whole
    model or of its first `layers`; else "tensors"."""

    path: str
    source: str
    fingerprint: str
    skipped: bool
    checked: str
    logit_difference: float | None
    layers: int | None = None


def converted(hf_dir: str | Path, out_dir: str | Path) -> Conversion | None:
    """The conversion that `out_dir` holds, if it is complete and of this very source."""
    out = Path(out_dir)
    about = manifest.read(out)
    if about is None or about.get("kind") != KIND:
        return None
    known = str(about.get("fingerprint"))
    if source_fingerprint(hf_dir, like=known) != known or manifest.verify(out) is not None:
        return None
    difference, layers = about.get("logit_difference"), about.get("layers")
    checked = about.get("checked", "logits")
    return Conversion(str(out), str(hf_dir), known, True, checked, difference, layers)


def convert_to_torch_dist(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    check: Check = "auto",
    workers: int = WORKERS,
    report: Report | None = None,
) -> Conversion:
    """Write the model of `hf_dir` as a torch_dist directory that stands on its own.

    Weight by weight, in the source's dtypes: memory for the `workers` largest weights. Skipped when
    `out_dir` already holds it; one that was interrupted is continued. The directory appears under
    its name only when complete and compared with the source: an older conversion there is replaced,
    anything else is not. Every tensor is read back and compared, bit for bit. "auto" compares
    logits with transformers' as well, of the first layers among which is one of every kind, where
    two such float32 models fit into memory; "logits" those of the whole model; "tensors" none.
    Joins a process group of its own.
    Raises FileNotFoundError, UnsupportedModel, FileExistsError, Busy or ConversionError.
    """
    done = converted(hf_dir, out_dir)
    if done is not None:
        return done
    source, out = Path(hf_dir), Path(out_dir)
    _may_replace(out)
    fingerprint = source_fingerprint(source)
    with unfinished(out, fingerprint) as directory:
        try:
            stream = Stream(source, directory)
            digests = stream.run(workers, report)
            difference, layers = _compare_logits(directory, source, check, stream.map)
        except (ConversionError, ValueError, KeyError):
            shutil.rmtree(directory)  # going on would end in the same way
            raise
        (directory / PROGRESS_FILE).unlink()
        copy_hf_files(source, directory / HF_DIR)
        checked = "tensors" if difference is None else "logits"
        manifest.seal(
            directory,
            digests,
            kind=KIND,
            fingerprint=fingerprint,
            checked=checked,
            logit_difference=difference,
            layers=layers,
        )
        manifest.put_in_place(directory, out)
    return Conversion(str(out), str(source), fingerprint, False, checked, difference, layers)


def _may_replace(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    about = manifest.read(out)
    if about is None or about.get("kind") != KIND:
        raise FileExistsError(f"{out} holds something else than a conversion; choose another path")


def _compare_logits(
    directory: Path, source: Path, check: Check, layout: ShardMap
) -> tuple[float | None, int | None]:
    """The difference of logits, and of how many layers unless of all; None when not compared."""
    from miles_core.modeling.hf_config import read_spec

    if check == "tensors":
        return None, None
    spec, layers = read_spec(source), None
    if check == "auto":
        layers = telling_layers(spec)
        if not logits_fit(values_of(layout, cut_short(spec, layers))):
            return None, None
    return logit_difference(directory, source, layers, layout), layers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m miles_core.checkpoints.convert",
        description="Convert a Hugging Face directory to a torch_dist directory, or back.",
    )
    parser.add_argument("source", help="Hugging Face directory (with --export: torch_dist)")
    parser.add_argument("out", help="directory to write")
    parser.add_argument("--export", action="store_true", help="from torch_dist to Hugging Face")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 for success; 2 with one line on stderr for what a person can put right."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        if args.export:
            export_to_hf(args.source, args.out)
            result: dict[str, object] = {"path": args.out, "source": args.source}
        else:
            result = asdict(convert_to_torch_dist(args.source, args.out))
    except (OSError, ValueError, KeyError, ConversionError, Busy) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['path']}" + (" (unchanged)" if result.get("skipped") else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
