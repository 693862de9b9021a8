"""Loading the configuration: flags over environment over preset over defaults.

Each layer is a source of pydantic-settings. They are read one by one and merged here, so that the
origin of every value is known and errors can name the file, variable or flag to change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from miles_core.config.explain import missing_preset_hint, validation_lines
from miles_core.config.keys import (
    ENV_PREFIX,
    LIST_KEYS_COMMAND,
    Key,
    all_keys,
    find_key,
    nearest,
    nearest_key,
    sections,
)
from miles_core.config.presets import ConfigError, Preset, read_preset
from miles_core.config.schema import MilesConfig

PRESET_ENV = "MILES_PRESET"
OTHER_ENV = (
    PRESET_ENV,
    "MILES_HOME",  # of prefect.yaml
    "MILES_SESSION_TOKEN",
    "MILES_NODE_EXTERNAL_IP",
    "MILES_CLUSTER_ID",  # marks the processes of a local cluster
)
"""The variables with our prefix that are no keys of the configuration."""


class _Raw(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=True
    )


# What the sources read: one table of raw values for each section.
_Layout = create_model(
    "_Layout", __base__=_Raw, **{name: (dict[str, Any], {}) for name in sections()}
)  # type: ignore[call-overload]


class _PresetSource(InitSettingsSource):
    """The tables of a preset; relative paths start from the preset's root."""

    def __init__(self, preset: Preset) -> None:
        tables: dict[str, Any] = {}
        for section, table in preset.values.items():
            tables[section] = {
                name: _resolve(all_keys()[f"{section}.{name}"], value, preset.root)
                for name, value in table.items()
            }
        super().__init__(_Layout, init_kwargs=tables)


class _EnvSource(EnvSettingsSource):
    """`MILES_SECTION__KEY` of a given environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(_Layout)

    def _load_env_vars(self) -> dict[str, str | None]:
        return {n.lower(): v for n, v in self._environ.items() if _is_setting(n) and v}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return value  # every value stays text until `_from_text`


class _FlagSource(PydanticBaseSettingsSource):
    """Flags of the command line, by dotted key."""

    def __init__(self, flags: Mapping[str, str]) -> None:
        super().__init__(_Layout)
        self._flags = flags

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        prefix = f"{field_name}."
        found = {k.removeprefix(prefix): v for k, v in self._flags.items() if k.startswith(prefix)}
        return found, field_name, False

    def __call__(self) -> dict[str, Any]:
        return {
            name: values
            for name, field in _Layout.model_fields.items()
            if (values := self.get_field_value(field, name)[0])
        }


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and, for each dotted key, where its value came from.

    An origin reads `flag --num-rollout`, `environment MILES_ROLLOUT__NUM_ROLLOUT`,
    `presets/quickstart.toml` or `default`.
    """

    config: MilesConfig
    origins: dict[str, str]


def load_config(
    preset: str | None, flags: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Resolve the configuration of a run.

    `preset` is a name or a path; without one `MILES_PRESET` is used, or none. `flags` maps keys
    (`num-rollout`, `rollout.num_rollout`, ...) to text. `environ` defaults to the process's.
    Relative paths of flags and environment start from the current directory. Raises ConfigError
    with one line for each problem.
    """
    environ = os.environ if environ is None else environ
    preset = preset or environ.get(PRESET_ENV) or None
    found = read_preset(preset) if preset else None
    normal_flags, errors = _normal_flags(flags)
    errors += _unknown_env(environ)
    if found is not None:
        errors += _unknown_preset_keys(found)
    if errors:
        raise ConfigError("\n".join(errors), f"all keys: {LIST_KEYS_COMMAND}")

    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(all_keys(), "default")
    if found is not None:
        _merge(values, origins, _PresetSource(found)(), lambda key: found.label)
    cwd = Path.cwd()
    layers: list[tuple[PydanticBaseSettingsSource, Callable[[Key], str]]] = [
        (_EnvSource(environ), lambda key: f"environment {key.env}"),
        (_FlagSource(normal_flags), lambda key: f"flag {key.flag}"),
    ]
    for source, origin in layers:
        layer = source()
        for section, table in layer.items():
            for name, text in table.items():
                key = all_keys()[f"{section}.{name}"]
                table[name] = _resolve(key, _from_text(key, text), cwd)
        _merge(values, origins, layer, origin)
    return LoadedConfig(_validate(values, origins, found), origins)


def _validate(
    values: dict[str, Any], origins: dict[str, str], preset: Preset | None
) -> MilesConfig:
    for section in sections():
        values.setdefault(section, {})
    try:
        config = MilesConfig.model_validate(
            {"preset": preset.name if preset else "custom", **values}
        )
    except ValidationError as error:
        fix = f"all keys: {LIST_KEYS_COMMAND}"
        if preset is None and any(e["type"] == "missing" for e in error.errors()):
            fix = missing_preset_hint()
        raise ConfigError("\n".join(validation_lines(error, origins)), fix) from None
    return _absolute_defaults(config)


def _absolute_defaults(config: MilesConfig) -> MilesConfig:
    """Paths that came from defaults start from the current directory."""
    for key in all_keys().values():
        section: BaseModel = getattr(config, key.section)
        value = getattr(section, key.name)
        if isinstance(value, Path) and not value.is_absolute():
            setattr(section, key.name, value.absolute())
    return config


def _merge(
    values: dict[str, Any],
    origins: dict[str, str],
    layer: dict[str, Any],
    origin: Callable[[Key], str],
) -> None:
    for section, table in layer.items():
        for name, value in table.items():
            values.setdefault(section, {})[name] = value
            key = all_keys()[f"{section}.{name}"]
            origins[key.dotted] = origin(key)


def _resolve(key: Key, value: Any, root: Path) -> Any:
    """A path value as an absolute one; links stay as they are."""
    if not key.is_path or not isinstance(value, str) or not value:
        return value
    return os.path.normpath(root / os.path.expanduser(value))


def _from_text(key: Key, text: str) -> Any:
    """Text of a flag or variable: `none` unsets, a list is JSON or separated by commas."""
    if key.optional and text.lower() == "none":
        return None
    if key.is_list:
        if text.lstrip().startswith("["):
            try:
                return json.loads(text)
            except ValueError:
                return text
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _is_setting(name: str) -> bool:
    return name.upper().startswith(ENV_PREFIX) and "__" in name


def _did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ""


def _normal_flags(flags: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    normal, errors = {}, []
    for name, value in flags.items():
        key = find_key(name)
        if key is not None:
            normal[key.dotted] = value
            continue
        hint = nearest_key(name.removeprefix("--").replace("-", "_"))
        shown = "--" + name.removeprefix("--").replace("_", "-")
        errors.append(
            f"command line: {shown}: unknown flag{_did_you_mean(hint.flag if hint else None)}"
        )
    return normal, errors


def _unknown_env(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that are neither a key nor one of the others."""
    keys = {key.env for key in all_keys().values()}
    return [
        f"environment: {name}: unknown key{_did_you_mean(_meant_env(name))}"
        for name in sorted(environ)
        if name.upper().startswith(ENV_PREFIX)
        and name.upper() not in keys
        and name not in OTHER_ENV
    ]


def _meant_env(name: str) -> str | None:
    """The variable that was probably meant: with its section, or spelled right."""
    plain = name[len(ENV_PREFIX) :].lower()
    for key in all_keys().values():
        if plain in (key.name, f"{key.section}_{key.name}"):
            return key.env
    if other := nearest(name.upper(), OTHER_ENV):
        return other
    hint = nearest_key(plain.replace("__", "."))
    return hint.env if hint else None


def _unknown_preset_keys(preset: Preset) -> list[str]:
    errors = []
    for section, table in preset.values.items():
        if not isinstance(table, dict):
            hint = nearest_key(section)
            meant = _did_you_mean(hint.dotted if hint else None)
            errors.append(f"{preset.label}: {section}: not in a table{meant}")
            continue
        if section not in sections():
            meant = _did_you_mean(nearest(section, sections()))
            errors.append(f"{preset.label}: [{section}]: unknown section{meant}")
            continue
        for name in table:
            dotted = f"{section}.{name}"
            if dotted not in all_keys():
                hint = nearest_key(dotted)
                meant = _did_you_mean(hint.dotted if hint else None)
                errors.append(f"{preset.label}: {dotted}: unknown key{meant}")
    return errors
