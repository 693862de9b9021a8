"""Is a torch_dist directory whole, and does it hold the model that it should?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_core.checkpoints import adapters, store
from miles_core.checkpoints.compare import (
    ConversionError,
    differing_tensors,
    logit_difference,
    logits_fit,
)

_SHOWN = 5


@dataclass(frozen=True)
class Checked:
    """One check and what it found wrong; `detail` says what a passed one measured."""

    name: str
    problem: str | None
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """All checks of a directory."""

    path: str
    checks: list[Checked]

    @property
    def whole(self) -> bool:
        return all(check.problem is None for check in self.checks)


def verify(directory: Path, hf_dir: Path | None = None, base: Path | None = None) -> Verification:
    """Check files and index; with `hf_dir` every tensor bit for bit, and the logits where two
    float32 models fit into memory. Of adapters it is checked that the model under them is there
    (`base`: where, if it was moved) and, with `hf_dir`, that it is that one. Later checks are left
    out once one has failed.

    The comparison joins a process group of its own.
    """
    from miles_core.modeling.shard_reader import index_problem

    checks = [Checked("files", store.verify(directory))]
    if checks[-1].problem is None:
        try:
            checks.append(Checked("index", index_problem(directory)))
        except (ValueError, OSError) as error:
            checks.append(Checked("index", str(error)))
    if checks[-1].problem is None and adapters.read(directory) is not None:
        checks.append(_base(directory, base, hf_dir))
    elif checks[-1].problem is None and hf_dir is not None:
        checks.append(_tensors(directory, hf_dir))
        if checks[-1].problem is None:
            checks.append(_logits(directory, hf_dir))
    return Verification(str(directory), checks)


def _base(directory: Path, base: Path | None, hf_dir: Path | None) -> Checked:
    try:
        found = adapters.find_base(directory, base)
        if hf_dir is not None:
            adapters.find_base(directory, hf_dir)
    except (ValueError, OSError) as error:
        return Checked("base", str(error))
    return Checked("base", None, f"is {found}")


def _tensors(directory: Path, hf_dir: Path) -> Checked:
    differing = differing_tensors(directory, hf_dir)
    if not differing:
        return Checked("tensors", None, "equal bit for bit")
    names = ", ".join(differing[:_SHOWN])
    return Checked("tensors", f"{len(differing)} differ from {hf_dir}: {names}")


def _logits(directory: Path, hf_dir: Path) -> Checked:
    from miles_core.checkpoints.contents import contents

    weights = sum(s.values for s in contents(directory).sections if s.name == "model")
    if not logits_fit(weights):
        return Checked("logits", None, "not compared: two float32 models do not fit into memory")
    try:
        difference = logit_difference(directory, hf_dir)
    except ConversionError as error:
        return Checked("logits", str(error))
    return Checked("logits", None, f"differ by {difference:.1e} of the largest")
