"""Command-line flags of the configuration, made from its schema."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from miles_core.config.keys import Key, all_keys
from miles_core.config.presets import preset_names


class ArgumentParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and names the nearest flag for an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        """As argparse's, but what is left over is an error of the (sub)command it belongs to."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest))
        return found, rest

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n  all flags: {self.prog} --help\n")
        sys.exit(2)

    def _unknown(self, rest: Sequence[str]) -> str:
        known = list(self._option_string_actions)
        parts = []
        for word in rest:
            if not word.startswith("-"):
                continue
            flag = word.partition("=")[0]
            similar = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            parts.append(f"unknown flag {flag}{hint}")
        return "\n  ".join(parts) or f"unexpected argument {rest[0]}"


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
