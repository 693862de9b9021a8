"""Whether the directories of reference and critic are whole, and of the policy's kind."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from miles_core.checkpoints import adapters, manifest, store
from miles_core.checkpoints.layout import HF_DIR
from miles_core.config.schema import MilesConfig
from miles_core.modeling.hf_config import UnsupportedModel, read_spec

NAMES = ("ref_load", "critic_load")
# What of a model may differ without a change of what it computes.
_FREE = ("max_positions",)


def given(config: MilesConfig) -> dict[str, Path]:
    """The directories that the configuration names, by field of `model`."""
    named = {name: getattr(config.model, name) for name in NAMES}
    return {name: path for name, path in named.items() if path is not None}


def directory_fault(directory: Path, name: str) -> str | None:
    """Why an existing directory is no torch_dist directory that `name` can start from, or None.

    Reads every file that its manifest has.
    """
    if not (directory / "metadata.json").is_file():
        if (directory / "config.json").is_file():
            return (
                f"{directory} is a Hugging Face directory; `miles checkpoint convert {directory} "
                "OUT` makes a torch_dist directory of it"
            )
        inside = store.published(directory)
        hint = f"; it is in a folder of checkpoints, such as {inside[0]}" if inside else ""
        return f"{directory} is no torch_dist directory{hint}"
    if name == "ref_load" and adapters.read(directory) is not None:
        return f"{directory} holds adapters alone; `miles checkpoint export` merges them"
    problem = manifest.verify_if_sealed(directory)
    return None if problem is None else f"{directory} is damaged: {problem}"


def other_model_fault(directory: Path, policy: Path) -> str | None:
    """What a torch_dist directory computes differently from the policy's Hugging Face directory,
    or None: it is loaded into a model that is built as the policy is."""
    try:
        own, other = asdict(read_spec(policy)), asdict(read_spec(directory / HF_DIR))
    except (UnsupportedModel, OSError, ValueError) as error:
        return f"{directory}: {error}"
    differ = [
        f"{field} {other[field]} instead of {own[field]}"
        for field in own
        if field not in _FREE and own[field] != other[field]
    ]
    return f"{directory} is another model than {policy}: {', '.join(differ)}" if differ else None
