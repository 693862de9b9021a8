"""Presets: TOML files with one table for each section of the configuration."""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.config.keys import nearest
from miles_core.errors import UserError


class ConfigError(UserError):
    """The configuration is wrong; the message has one line for each problem."""


def preset_dirs() -> list[Path]:
    """Where presets are looked up by name: beside the packages, then in the installation."""
    beside = Path(__file__).resolve().parents[2] / "presets"
    installed = Path(sys.prefix) / "share" / "miles-flow" / "presets"
    return [directory for directory in (beside, installed) if directory.is_dir()]


def preset_names() -> list[str]:
    """The names of all presets that can be found."""
    return sorted({file.stem for directory in preset_dirs() for file in directory.glob("*.toml")})


@dataclass(frozen=True)
class Preset:
    """A preset file and what stands in it."""

    name: str
    path: Path
    values: dict[str, Any]

    @property
    def root(self) -> Path:
        """What its relative paths start from: the parent of `presets/`, else its own folder."""
        folder = self.path.parent
        return folder.parent if folder.name == "presets" else folder

    @property
    def label(self) -> str:
        """The file as a person knows it: relative to the current directory when it is below."""
        try:
            return str(self.path.relative_to(Path.cwd()))
        except ValueError:
            known = self.path.parent in preset_dirs()
            return f"presets/{self.path.name}" if known else str(self.path)


def find_preset(preset: str) -> Path:
    """The file of a preset that is given by name or by path."""
    if preset.endswith(".toml") or os.sep in preset:
        path = Path(preset).expanduser().absolute()
        if path.is_file():
            return path
        raise ConfigError(f"preset {preset}: there is no such file", _choose())
    for directory in preset_dirs():
        path = directory / f"{preset}.toml"
        if path.is_file():
            return path
    hint = nearest(preset, preset_names())
    meant = f"; did you mean {hint}?" if hint else ""
    raise ConfigError(f"preset {preset}: there is none of that name{meant}", _choose())


def _choose() -> str:
    return f"give --preset a path or one of: {', '.join(preset_names())}"


def read_preset(preset: str) -> Preset:
    """Find and parse a preset."""
    path = find_preset(preset)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", "correct the file") from error
    return Preset(path.stem, path, values)
