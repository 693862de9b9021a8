"""Command-line flags of the configuration, made from its schema."""

from __future__ import annotations

import argparse
from typing import Any

from miles_core.config.keys import Key, all_keys
from miles_core.config.presets import preset_names


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and a flag for each key, in one group for each section.

    `rollout.num_rollout` is `--num-rollout` and `--rollout.num-rollout`. A switch takes
    `--shuffle`, `--no-shuffle` or `--shuffle false`. Read them back with `config_flags`.
    """
    parser.add_argument(
        "--preset",
        metavar="NAME|FILE",
        help=f"preset to start from ({', '.join(preset_names())}, or a TOML file)",
    )
    groups: dict[str, Any] = {}
    for key in all_keys().values():
        if key.section not in groups:
            groups[key.section] = parser.add_argument_group(f"{key.section} options")
        _add_flag(groups[key.section], key)


def config_flags(args: argparse.Namespace) -> dict[str, str]:
    """The flags of `add_config_flags` that were given, by dotted key."""
    return {name: value for name, value in vars(args).items() if name in all_keys()}


def flag_help(key: Key) -> str:
    """Description, type and default of a key in one line."""
    if key.required:
        default = "required"
    elif key.default is None or key.is_list:
        default = ""
    else:
        default = f"default: {str(key.default).lower() if key.is_bool else key.default}"
    text = key.field.description or ""
    if key.is_list:
        text += "; separated by commas"
    return f"{text} ({default})" if default else text


def _add_flag(group: Any, key: Key) -> None:
    text = flag_help(key).replace("%", "%%")
    common = {"dest": key.dotted, "default": argparse.SUPPRESS, "help": text}
    if key.is_bool:
        group.add_argument(*key.flags, nargs="?", const="true", metavar="true|false", **common)
        off = [f"--no-{key.flag[2:]}"]
        common["help"] = f"same as {key.flag} false"
        group.add_argument(*off, action="store_const", const="false", **common)
        return
    metavar = key.kind if key.choices else key.kind.upper()
    group.add_argument(*key.flags, metavar=metavar, **common)
