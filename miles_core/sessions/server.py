"""Entry point of a session server: `python -m miles_core.sessions.server`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import ipaddress
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from miles_core.errors import UserError
from miles_core.serving import Server, bind, exit_status
from miles_core.sessions.app import SessionApp
from miles_core.sessions.chat import ChatService
from miles_core.sessions.engine_call import EngineCaller
from miles_core.sessions.families import FAMILIES, ChatFamily, load_family
from miles_core.sessions.parsers.sglang import Parse, sglang_parser
from miles_core.sessions.store import Limits, SessionStore

log = logging.getLogger("miles.sessions")


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
        "--engine-url", action="append", required=True, help="engine or router; repeatable"
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
        "--engine-timeout", type=float, default=1800.0, help="seconds that a model call may take"
    )
    parser.add_argument(
        "--spill-dir",
        type=Path,
        help="folder of the sessions on disk; default: a temporary one",
    )
    parser.add_argument(
        "--spill-after",
        type=float,
        default=60.0,
        help="seconds after which a session that nobody uses leaves memory",
    )
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=14400.0,
        help="seconds after which a session that nobody uses ends",
    )
    return parser.parse_args(argv)


def _check_exposure(host: str, token: str | None) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and token is None:
        raise UserError(
            f"a session server on {host} needs a token for its control routes",
            "Set MILES_SESSION_TOKEN.",
        )


def serve(args: argparse.Namespace) -> None:
    token = os.environ.get("MILES_SESSION_TOKEN") or None
    _check_exposure(args.host, token)
    sock = bind(args.host, args.port)
    family = load_family(args.tokenizer, args.chat_family)
    log.info("chat family %s, stop tokens %s", family.name, family.stop_token_ids)
    with _spill_dir(args.spill_dir) as directory:
        store = SessionStore(directory, Limits(args.spill_after, args.session_timeout))
        engine = EngineCaller(args.engine_url, args.engine_timeout)
        chat = ChatService(family, _parser(family, args.parsers), engine, store)
        _run(args, SessionApp(chat, token).starlette(), sock)


def _parser(family: ChatFamily, wanted: str) -> Parse:
    """Who reads the answers of a family: SGLang's parsers, where they are, or our own."""
    found = None if wanted == "built-in" else sglang_parser(family.name)
    if found is None and wanted == "sglang":
        raise UserError(
            f"SGLang is not installed, or has no parsers for chat family {family.name!r}",
            "Install it, or take --parsers auto.",
        )
    log.info("answers are read by %s", "built-in parsers" if found is None else "SGLang's parsers")
    return found or family.notation.parse


@contextlib.contextmanager
def _spill_dir(given: Path | None) -> Iterator[Path]:
    """The given folder, which outlives the server, or one that does not."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="miles-sessions-") as directory:
            yield Path(directory)
        return
    try:
        given.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"--spill-dir {given}: {error.strerror or error}") from error
    yield given


def _run(args: argparse.Namespace, app: Starlette, sock: socket.socket) -> None:
    # What exists by now lives as long as the process: looking through it for garbage would hold up
    # every request for tens of milliseconds. What a turn leaves behind is hardly ever garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    config = uvicorn.Config(
        app,
        # Paths hold the secrets of sessions, so requests are not logged.
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
    )
    Server(config, args.ready_file, args.parent_pid).run(sockets=[sock])


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
