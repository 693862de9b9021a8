"""The flags of a session server."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from urllib.parse import urlsplit

from miles_core.sessions.families import FAMILIES


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _engine_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL such as http://127.0.0.1:30000")
    return text


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m miles_core.sessions.server",
        description="Serve token-exact chat sessions over rollout engines",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=0, help="port; 0: the kernel chooses")
    parser.add_argument("--ready-file", type=Path, help="written when the server can serve")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="checkpoint directory with tokenizer.json"
    )
    parser.add_argument(
        "--engine-url",
        action="append",
        default=[],
        type=_engine_url,
        help="engine or router; repeatable. Without any, calls wait for PUT /engines",
    )
    parser.add_argument(
        "--chat-family", default="auto", help=f"chat family: auto, {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--parsers",
        choices=("auto", "sglang", "built-in"),
        default="auto",
        help="who reads calls and reasoning; auto: SGLang's own where it is installed",
    )
    parser.add_argument(
        "--engine-timeout",
        type=_seconds,
        default=1800.0,
        help="seconds that a model call may take",
    )
    parser.add_argument(
        "--spill-dir",
        type=Path,
        help="folder of the sessions on disk; default: a temporary one",
    )
    parser.add_argument(
        "--spill-after",
        type=_seconds,
        default=60.0,
        help="seconds after which a session that nobody uses leaves memory",
    )
    parser.add_argument(
        "--session-timeout",
        type=_seconds,
        default=14400.0,
        help="seconds after which a session that nobody uses ends",
    )
    return parser.parse_args(argv)
