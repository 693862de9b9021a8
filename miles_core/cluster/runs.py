"""Opening a run: which one a configuration means, and whether it may go on."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from miles_core.runs.directory import RunDir
from miles_core.runs.files import fingerprint
from miles_core.runs.fold import fold
from miles_core.runs.identity import changes, refuse_other_run
from miles_core.runs.journal import read
from miles_core.runs.lock import holder

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

_WHOLE_BYTES = 64 * 1024 * 1024
_EDGE_BYTES = 1024 * 1024
_NAME_KEYS = frozenset({"run.run_name", "preset"})


def run_path(config: MilesConfig) -> Path:
    """Folder of the run that a configuration with a name means."""
    if config.run.run_name is None:
        raise ValueError("the configuration has no run_name yet; see `named`")
    return config.run.runs_dir / config.run.run_name


def named(config: MilesConfig, name: str) -> MilesConfig:
    """The configuration with a run name, its own or `name`."""
    if config.run.run_name is not None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"run_name": name})})


def with_absolute_paths(config: MilesConfig) -> MilesConfig:
    """The configuration with its relative paths taken from the current directory."""
    sections = {}
    for name in type(config).model_fields:
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            continue
        paths = {
            key: value.absolute()
            for key in type(section).model_fields
            if isinstance(value := getattr(section, key), Path)
        }
        sections[name] = section.model_copy(update=paths)
    return config.model_copy(update=sections)


def new_name(config: MilesConfig) -> str:
    """A name from the preset and the time that is not taken."""
    stem = f"{Path(config.preset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, k = stem, 2
    while (config.run.runs_dir / name).exists():
        name, k = f"{stem}-{k}", k + 1
    return name


def cache_dir(config: MilesConfig) -> Path:
    """Where prepared data, models and conversions are kept over runs."""
    return config.model.cache_dir or config.run.runs_dir / ".cache"


def weights_fingerprint(folder: Path) -> str:
    """Digest of a model directory: names, sizes and bytes; of large files the two ends."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= _WHOLE_BYTES:
                digest.update(opened.read())
            else:
                digest.update(opened.read(_EDGE_BYTES))
                opened.seek(-_EDGE_BYTES, os.SEEK_END)
                digest.update(opened.read())
    return digest.hexdigest()


def input_fingerprints(config: MilesConfig) -> dict[str, str]:
    """What the run is made from, by content: rows, tasks, model. Missing inputs are left out."""
    found = {}
    model, server = config.model, config.agent_server
    if config.data.prompt_data.exists():
        found["data"] = fingerprint(config.data.prompt_data)
    if server.agent_server_url is None and server.tasks_dir.is_dir():
        found["tasks"] = fingerprint(server.tasks_dir)
    if model.hf_checkpoint is not None and model.hf_checkpoint.is_dir():
        found["model"] = weights_fingerprint(model.hf_checkpoint)
    elif model.model_recipe is not None and model.model_recipe.is_file():
        found["model"] = fingerprint(model.model_recipe)
    return found


def open_run(config: MilesConfig) -> RunDir:
    """Make the run that the configuration names, or open it to go on.

    Raises UserError when the run exists and the configuration or its inputs would make it another
    one.
    """
    run = RunDir(run_path(config))
    fingerprints = input_fingerprints(config)
    if not run.exists():
        return RunDir.create(run.path, config, fingerprints)
    if refuse_other_run(run, config, fingerprints):
        run.save_config(config)
    return run


def unfinished(config: MilesConfig) -> RunDir | None:
    """The newest run of the same configuration that neither ended well nor was cancelled, and
    that nothing drives."""
    candidates = []
    for record in config.run.runs_dir.glob("*/run.json"):
        run = RunDir(record.parent)
        if run.path.is_symlink():
            continue
        candidates.append((run.identity()["created"], run))
    for _, run in sorted(candidates, key=lambda c: c[0], reverse=True):
        different = {c.key for c in changes(run.load_config(), config)} - _NAME_KEYS
        if different or holder(run) is not None:
            continue
        if fold(read(run.journal)).state in ("completed", "cancelled"):
            continue
        return run
    return None


def point_latest(run: RunDir) -> None:
    """Let `latest` beside the run point at it."""
    link = run.path.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    tmp = link.with_name(f".latest.{os.getpid()}")
    tmp.unlink(missing_ok=True)
    tmp.symlink_to(run.path.name)
    os.replace(tmp, link)
