"""Does a torch_dist directory hold the model of a Hugging Face directory?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Largest difference of logits to transformers', as a share of the largest logit, in float32.
LOGIT_TOLERANCE = 1e-4
# Bytes for each weight that a comparison of logits needs: two float32 models, and room to load.
_BYTES_PER_WEIGHT = 10
_CGROUP = Path("/sys/fs/cgroup")


class ConversionError(RuntimeError):
    """A directory does not hold the model that it should."""


def available_memory() -> int | None:
    """Bytes that this process may still take, or None where the system does not say."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(values["MemAvailable"].split()[0]) * 1024)
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        if most != "max":
            limits.append(int(most) - int((_CGROUP / "memory.current").read_text()))
    except OSError:
        pass  # no limit of this kind
    return min(limits) if limits else None


def logits_fit(weights: int) -> bool:
    """Whether a comparison of logits of this many weights is likely to find enough memory."""
    available = available_memory()
    return available is None or weights * _BYTES_PER_WEIGHT < available


def logit_difference(torch_dist: Path, hf_dir: Path) -> float:
    """Largest difference of packed logits to transformers', as a share of the largest logit.

    Loads both models in float32 and joins a process group of its own.
    Raises ConversionError when it is above LOGIT_TOLERANCE.
    """
    import torch

    from miles_core.checkpoints.layout import HF_DIR
    from miles_core.modeling import dist_state, parallel
    from miles_core.modeling.gpt import build_model
    from miles_core.modeling.hf_config import read_spec

    files = torch_dist / HF_DIR
    spec = read_spec(files if files.is_dir() else hf_dir)
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        model = build_model(spec, 1, torch.float32)
        dist_state.load(torch_dist, model)
        return compare_logits(model, hf_dir)
    finally:
        parallel.stop()


def compare_logits(model: object, hf_dir: Path) -> float:
    """As `logit_difference`, for a model that is loaded."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from miles_core.modeling.gpt import PolicyModel

    assert isinstance(model, PolicyModel)
    transformers_logging.disable_progress_bar()
    # the default for experts wants sizes that are multiples of 16 bytes
    reference = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()
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


def differing_tensors(torch_dist: Path, hf_dir: Path, workers: int = 2) -> list[str]:
    """Hugging Face names of the tensors that are not, bit for bit, those of `hf_dir`.

    Needs memory for the `workers` largest ones. Joins a process group of its own.
    """
    import torch

    from miles_core.modeling.families import weights
    from miles_core.modeling.hf_config import read_spec
    from miles_core.modeling.hf_weights import HFReader
    from miles_core.modeling.mapping import Weight
    from miles_core.modeling.shard_map import shard_map
    from miles_core.modeling.sharded_files import ShardReader

    spec = read_spec(hf_dir)
    layout, stored, source = shard_map(spec), ShardReader(torch_dist), HFReader(hf_dir)

    def differing(weight: Weight) -> list[str]:
        value = stored.parameter(layout.pieces[weight.ours], layout.shapes[weight.ours])
        parts = zip(weight.theirs, weight.cut.whole([value]), strict=True)
        return [name for name, part in parts if not torch.equal(part, source(name))]

    with ThreadPoolExecutor(workers) as pool:
        return [name for names in pool.map(differing, weights(spec)) for name in names]
