"""Does a torch_dist directory hold the model of a Hugging Face directory?"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from miles_core.modeling.hf_config import ModelSpec
    from miles_core.modeling.mapping import Weight
    from miles_core.modeling.shard_map import ShardMap
    from miles_core.modeling.shard_reader import ShardReader

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


def telling_layers(spec: ModelSpec) -> int:
    """The number of first layers among which is one of every kind that the model has."""
    from miles_core.modeling.families import FAMILIES

    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(spec.num_layers):
        names = tuple(
            weight.ours.replace(f"layers.{layer}.", "layers.", 1)
            for weight in FAMILIES[spec.model_type].layer(spec, layer)
        )
        kinds.setdefault(names, layer)
    return max(kinds.values()) + 1


def cut_short(spec: ModelSpec, layers: int) -> ModelSpec:
    """The model without the layers after the first `layers`."""
    moe = spec.moe and replace(spec.moe, sparse=spec.moe.sparse[:layers])
    return replace(spec, num_layers=layers, moe=moe)


def values_of(layout: ShardMap, spec: ModelSpec) -> int:
    """Number of single values in a model of which `layout` holds the weights."""
    from miles_core.modeling.families import weights

    return sum(math.prod(layout.shapes[weight.ours]) for weight in weights(spec))


def logit_difference(
    torch_dist: Path, hf_dir: Path, layers: int | None = None, layout: ShardMap | None = None
) -> float:
    """Largest difference of packed logits to transformers', as a share of the largest logit.

    Loads both models in float32, both without what follows their first `layers` (default: whole),
    and joins a process group of its own. `layout` is the model's shard map, when it is known.
    Raises ConversionError when it is above LOGIT_TOLERANCE.
    """
    import torch

    from miles_core.checkpoints.layout import HF_DIR
    from miles_core.modeling import parallel
    from miles_core.modeling.gpt import build_model
    from miles_core.modeling.hf_config import read_spec
    from miles_core.modeling.shard_map import shard_map
    from miles_core.modeling.shard_reader import ShardReader

    files = torch_dist / HF_DIR
    spec = read_spec(files if files.is_dir() else hf_dir)
    layout = layout or shard_map(spec)
    stored = ShardReader(torch_dist)
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        model = build_model(cut_short(spec, layers or spec.num_layers), 1, torch.float32)
        with torch.no_grad():
            for name, tensor in model.stored_tensors():
                tensor.copy_(stored.parameter(layout.pieces[name], layout.shapes[name]))
        return compare_logits(model, hf_dir, layers)
    finally:
        parallel.stop()


def _reference(hf_dir: Path, layers: int | None) -> Any:
    """transformers' model in float32, of its first layers alone when `layers` says so.

    Raises ConversionError for a directory that transformers does not read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it warns of every layer that is left out
    try:
        config = AutoConfig.from_pretrained(hf_dir)
        if layers is not None:
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        # the default for experts wants sizes that are multiples of 16 bytes
        return AutoModelForCausalLM.from_pretrained(
            hf_dir, config=config, dtype=torch.float32, experts_implementation="eager"
        ).eval()
    except Exception as error:  # of many kinds, by what is wrong with the configuration
        raise ConversionError(
            f"transformers does not read {hf_dir}: {' '.join(str(error).split())}"
        ) from error
    finally:
        transformers_logging.set_verbosity(before)


def compare_logits(model: object, hf_dir: Path, layers: int | None = None) -> float:
    """As `logit_difference`, for a model that is loaded."""
    import torch

    from miles_core.modeling.gpt import PolicyModel

    assert isinstance(model, PolicyModel)
    reference = _reference(hf_dir, layers)
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


def differing_parts(
    weight: Weight, stored: ShardReader, layout: ShardMap, source: Callable[[str], torch.Tensor]
) -> list[str]:
    """Hugging Face names of a weight's tensors that are not, bit for bit, those of `source`, in the
    dtype that holds all of the weight's."""
    import torch

    value = stored.parameter(layout.pieces[weight.ours], layout.shapes[weight.ours])
    wanted = [source(name) for name in weight.theirs]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in wanted))
    parts = zip(weight.theirs, weight.cut.whole([value]), wanted, strict=True)
    return [name for name, part, like in parts if not _same_bits(part, like.to(dtype))]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    ours, theirs = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    if len(ours) % 8 == 0:  # several times faster
        ours, theirs = ours.view(torch.int64), theirs.view(torch.int64)
    return torch.equal(ours, theirs)


def differing_tensors(torch_dist: Path, hf_dir: Path, workers: int = 2) -> list[str]:
    """Hugging Face names of the tensors that are not, bit for bit, those of `hf_dir`.

    Needs memory for the `workers` largest ones. Joins a process group of its own.
    """
    from miles_core.modeling.families import weights
    from miles_core.modeling.hf_config import read_spec
    from miles_core.modeling.hf_weights import HFReader
    from miles_core.modeling.shard_map import shard_map
    from miles_core.modeling.shard_reader import ShardReader

    spec = read_spec(hf_dir)
    layout, stored, source = shard_map(spec), ShardReader(torch_dist), HFReader(hf_dir)

    def differing(weight: Weight) -> list[str]:
        return differing_parts(weight, stored, layout, source)

    with ThreadPoolExecutor(workers) as pool:
        return [name for names in pool.map(differing, weights(spec)) for name in names]
