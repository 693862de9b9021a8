"""Entry point of a session server: `python -m miles_core.sessions.server`."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from pathlib import Path

import uvicorn

from miles_core.errors import UserError
from miles_core.serving import Server, bind, exit_status
from miles_core.sessions.app import SessionApp
from miles_core.sessions.chat import ChatService
from miles_core.sessions.engine_call import EngineCaller
from miles_core.sessions.families.family import FAMILIES, load_family

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
        "--engine-timeout", type=float, default=1800.0, help="seconds that a model call may take"
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
    chat = ChatService(family, EngineCaller(args.engine_url, args.engine_timeout))
    config = uvicorn.Config(
        SessionApp(chat, token).starlette(),
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
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        serve(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
