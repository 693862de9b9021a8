"""The keys of the configuration: every field of the schema with its dotted name and its flag."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles_core.config.schema import MilesConfig, Section

ENV_PREFIX = "MILES_"
LIST_KEYS_COMMAND = "miles config keys"

# Names that the recipe used for the same thing.
FLAG_ALIASES = {"session_server_external_host": ("--router-external-host",)}


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration, such as `rollout.num_rollout`."""

    section: str
    name: str
    field: FieldInfo

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}__{self.name}".upper()

    @property
    def flags(self) -> tuple[str, ...]:
        """The flat flag, the dotted one, and older names."""
        dotted = f"--{self.section}.{self.name.replace('_', '-')}"
        return (self.flag, dotted, *FLAG_ALIASES.get(self.name, ()))

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """The default value; None for a required key."""
        value = self.field.get_default(call_default_factory=True, validated_data={})
        return None if value is PydanticUndefined else value

    @property
    def types(self) -> tuple[Any, ...]:
        """The members of the annotation when it is a union, else the annotation alone."""
        annotation = self.field.annotation
        if get_origin(annotation) in (Union, types.UnionType):
            return get_args(annotation)
        return (annotation,)

    @property
    def is_path(self) -> bool:
        return Path in self.types

    @property
    def is_bool(self) -> bool:
        return bool in self.types

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) is list for kind in self.types)

    @property
    def optional(self) -> bool:
        return type(None) in self.types

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words of a key that takes one of a few, else nothing."""
        return next((get_args(kind) for kind in self.types if get_origin(kind) is Literal), ())

    @property
    def kind(self) -> str:
        """The type in plain words."""
        if self.choices:
            return "|".join(self.choices)
        names = {int: "integer", float: "number", bool: "true|false", str: "text", Path: "path"}
        return "list" if self.is_list else next(names[k] for k in self.types if k in names)


@cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order of the schema."""
    keys = {}
    for section, field in MilesConfig.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            for name, leaf in model.model_fields.items():
                key = Key(section, name, leaf)
                keys[key.dotted] = key
    return keys


@cache
def sections() -> tuple[str, ...]:
    """The names of the sections."""
    return tuple(dict.fromkeys(key.section for key in all_keys().values()))


def find_key(name: str) -> Key | None:
    """The key of a dotted or flat name; dashes and underscores are the same."""
    plain = name.removeprefix("--").replace("-", "_")
    keys = all_keys()
    if plain in keys:
        return keys[plain]
    for key in keys.values():
        aliases = [a[2:].replace("-", "_") for a in FLAG_ALIASES.get(key.name, ())]
        if plain == key.name or plain in aliases:
            return key
    return None


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`, if one is like it at all."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(dotted: str) -> Key | None:
    """The key that was probably meant: the same name elsewhere, or a similar one."""
    leaf = dotted.rpartition(".")[2]
    exact = find_key(leaf)
    if exact is not None:
        return exact
    by_leaf = {key.name: key for key in all_keys().values()}
    found = nearest(dotted, all_keys())
    similar = nearest(leaf, by_leaf)
    if similar is not None:
        return by_leaf[similar]
    return all_keys()[found] if found else None
