"""Entry point of a session server: `python -m miles_core.sessions.server`."""

from __future__ import annotations

import argparse
import contextlib
import errno
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

from miles_core.errors import UserError
from miles_core.serving import Server, bind, check_ready_file, exit_status
from miles_core.sessions.app import SessionApp
from miles_core.sessions.arguments import parse_args
from miles_core.sessions.chat import ChatService
from miles_core.sessions.engine_call import EngineCaller
from miles_core.sessions.families import ChatFamily, load_family
from miles_core.sessions.http_limits import BoundedHead, raise_file_limit
from miles_core.sessions.journal import SUFFIX
from miles_core.sessions.parsers.sglang import Parse, sglang_parser
from miles_core.sessions.store import Limits, SessionStore, locked

log = logging.getLogger("miles.sessions")


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
    raise_file_limit()
    token = os.environ.get("MILES_SESSION_TOKEN") or None
    _check_exposure(args.host, token)
    if args.ready_file is not None:
        check_ready_file(args.ready_file)
    sock = bind(args.host, args.port)
    family = load_family(args.tokenizer, args.chat_family)
    log.info("chat family %s, stop tokens %s", family.name, family.stop_token_ids)
    with _spill_dir(args.spill_dir) as directory, locked(directory):
        store = SessionStore(directory, Limits(args.spill_after, args.session_timeout))
        engine = EngineCaller(args.engine_url, args.engine_timeout)
        chat = ChatService(family, _parser(family, args.parsers), engine, store)
        _run(args, SessionApp(chat, token), sock)


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
        with tempfile.TemporaryFile(dir=given) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        if error.errno == errno.ENOSPC and any(given.glob(f"*{SUFFIX}")):
            # What a server left that died for want of space can be read all the same.
            log.warning("--spill-dir %s: %s", given, error.strerror)
        else:
            raise UserError(
                f"--spill-dir {given}: {error.strerror or error}",
                "Name a folder that can be written.",
            ) from error
    yield given


class SessionServer(Server):
    """A server whose running calls end with a typed error when it is told to end."""

    def __init__(self, app: SessionApp, config: uvicorn.Config, args: argparse.Namespace) -> None:
        super().__init__(config, args.ready_file, args.parent_pid)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._app.shut_down()
        await super().shutdown(sockets)


def _run(args: argparse.Namespace, app: SessionApp, sock: socket.socket) -> None:
    # What exists by now lives as long as the process: looking through it for garbage would hold up
    # every request for tens of milliseconds. What a turn leaves behind is hardly ever garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    config = uvicorn.Config(
        app.starlette(),
        http=BoundedHead,
        # Paths hold the secrets of sessions, so requests are not logged.
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
    )
    SessionServer(app, config, args).run(sockets=[sock])


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
