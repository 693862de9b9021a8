"""`miles config`: the resolved configuration and where each value came from; all keys."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from miles_core.config.flags import add_config_flags, config_flags, flag_help
from miles_core.config.keys import all_keys
from miles_core.config.load import LoadedConfig, load_config


def register(subparsers: Any) -> None:
    """Add `miles config show` and `miles config keys`."""
    parser = subparsers.add_parser("config", help="show the configuration and its keys")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print each resolved value and where it came from")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(show)
    show.set_defaults(run=_show)
    keys = commands.add_parser("keys", help="list every key with its type, default and meaning")
    keys.add_argument("--json", action="store_true", help="print one JSON list")
    keys.set_defaults(run=_keys)


def _show(args: argparse.Namespace) -> int:
    loaded = load_config(args.preset, config_flags(args))
    rows = resolved_rows(loaded)
    if args.json:
        values = {row["key"]: {"value": row["value"], "origin": row["origin"]} for row in rows}
        print(json.dumps({"preset": loaded.config.preset, "values": values}, indent=2))
        return 0
    cells = [(r["key"], _text(r["value"]), r["origin"]) for r in rows]
    _print_table(("key", "value", "from"), cells)
    return 0


def resolved_rows(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """`{"key", "value", "origin"}` of every key; values are JSON types."""
    dump = loaded.config.model_dump(mode="json")
    return [
        {"key": key.dotted, "value": dump[key.section][key.name], "origin": loaded.origins[dotted]}
        for dotted, key in all_keys().items()
    ]


def _keys(args: argparse.Namespace) -> int:
    if args.json:
        rows = [
            {
                "key": key.dotted,
                "flag": key.flag,
                "environment": key.env,
                "type": key.kind,
                "required": key.required,
                "default": None if key.default is None else _plain(key.default),
                "description": key.field.description,
            }
            for key in all_keys().values()
        ]
        print(json.dumps(rows, indent=2))
        return 0
    cells = [(key.dotted, key.flag, key.kind, flag_help(key)) for key in all_keys().values()]
    _print_table(("key", "flag", "type", "meaning"), cells)
    return 0


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list)) else str(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table that is as wide as the terminal; a pipe gets every cell whole."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    width = None if sys.stdout.isatty() else 240
    Console(width=width).print(table)
