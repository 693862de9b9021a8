"""Hugging Face directories to torch_dist directories and back.

python -m miles_core.checkpoints.convert HF OUT [--json]
python -m miles_core.checkpoints.convert --export TORCH_DIST OUT_HF [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.checkpoints import manifest
from miles_core.checkpoints.fingerprint import source_fingerprint
from miles_core.checkpoints.layout import HF_DIR, copy_hf_files

KIND = "converted"
# Largest difference of logits to transformers, as a share of the largest logit, in float32.
LOGIT_TOLERANCE = 1e-4


class ConversionError(RuntimeError):
    """The converted model does not compute what the source computes."""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion. `logit_difference` is a share of the largest logit."""

    path: str
    source: str
    fingerprint: str
    skipped: bool
    logit_difference: float


def converted(hf_dir: str | Path, out_dir: str | Path) -> Conversion | None:
    """The conversion that `out_dir` holds, if it is complete and of this very source."""
    out = Path(out_dir)
    about = manifest.read(out)
    if about is None or about.get("kind") != KIND:
        return None
    fingerprint = source_fingerprint(hf_dir)
    if about["fingerprint"] != fingerprint or manifest.verify(out) is not None:
        return None
    return Conversion(str(out), str(hf_dir), fingerprint, True, about["logit_difference"])


def convert_to_torch_dist(hf_dir: str | Path, out_dir: str | Path) -> Conversion:
    """Write the model of `hf_dir` in float32 as a torch_dist directory that stands on its own.

    Skipped when `out_dir` already holds it. What was written is read back and its logits are
    compared with transformers'. The directory appears under its name only when complete; an older
    conversion there is replaced, anything else is not. Joins a process group of its own.
    Raises FileNotFoundError, UnsupportedModel, FileExistsError or ConversionError.
    """
    done = converted(hf_dir, out_dir)
    if done is not None:
        return done
    out = Path(out_dir)
    _may_replace(out)
    fingerprint = source_fingerprint(hf_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        difference = _write_and_compare(Path(hf_dir), temporary)
        copy_hf_files(Path(hf_dir), temporary / HF_DIR)
        manifest.seal(temporary, kind=KIND, fingerprint=fingerprint, logit_difference=difference)
        manifest.put_in_place(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Conversion(str(out), str(hf_dir), fingerprint, False, difference)


def _may_replace(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    about = manifest.read(out)
    if about is None or about.get("kind") != KIND:
        raise FileExistsError(f"{out} holds something else than a conversion; choose another path")


def _write_and_compare(hf_dir: Path, target: Path) -> float:
    import torch

    from miles_core.modeling import dist_state, parallel
    from miles_core.modeling.gpt import build_model
    from miles_core.modeling.hf_config import read_spec
    from miles_core.modeling.hf_weights import HFReader, load_hf

    spec = read_spec(hf_dir)
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        model = build_model(spec, 1, torch.float32)
        load_hf(model, spec, HFReader(hf_dir))
        dist_state.save(target, model)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        dist_state.load(target, model)
        return compare_logits(model, hf_dir)
    finally:
        parallel.stop()


def compare_logits(model: object, hf_dir: Path) -> float:
    """Largest difference of packed logits to transformers', as a share of the largest logit.

    Raises ConversionError when it is above LOGIT_TOLERANCE.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from miles_core.modeling.gpt import PolicyModel

    assert isinstance(model, PolicyModel)
    transformers_logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(model.vocab_size, (n,), generator=generator) for n in (64, 17)]
    device = next(model.parameters()).device
    with torch.no_grad():
        ours = model.packed_logits(torch.cat(texts).to(device), [len(t) for t in texts]).cpu()
        theirs = torch.cat([reference(text[None]).logits[0] for text in texts])
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not difference <= LOGIT_TOLERANCE:
        raise ConversionError(
            f"logits of the converted {hf_dir} differ from transformers' by {difference:.2e} of "
            f"the largest (limit {LOGIT_TOLERANCE:.0e})"
        )
    return difference


def export_to_hf(torch_dist_dir: str | Path, out_dir: str | Path) -> None:
    """Write a torch_dist directory (converted or an own checkpoint) as a Hugging Face directory.

    Raises FileExistsError when `out_dir` exists and is not empty.
    """
    import torch

    from miles_core.modeling import dist_state, parallel
    from miles_core.modeling.gpt import build_model
    from miles_core.modeling.hf_config import read_spec
    from miles_core.modeling.hf_weights import to_hf, write_hf

    source, out = Path(torch_dist_dir), Path(out_dir)
    if not dist_state.is_torch_dist(source):
        raise FileNotFoundError(f"{source} is not a torch_dist directory")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is not empty")
    spec = read_spec(source / HF_DIR)
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        model = build_model(spec, 1, torch.float32)
        dist_state.load(source, model)
        tensors = to_hf(model, spec)
    finally:
        parallel.stop()
    temporary = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    copy_hf_files(source / HF_DIR, temporary)
    write_hf(temporary, tensors)
    os.replace(temporary, out)


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
    except (OSError, ValueError, KeyError, ConversionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['path']}" + (" (unchanged)" if result.get("skipped") else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
