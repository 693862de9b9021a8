"""The embedded engine's process: `python -m miles_core.engines.server --model DIR`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

import uvicorn

from miles_core.errors import UserError
from miles_core.serving import Server, bind, exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles_core.engines.server", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory of a Qwen3 or Llama")
    add("--host", default="127.0.0.1", help="address to bind")
    add("--port", type=int, default=30000, help="port to bind; 0 takes a free one")
    add("--ready-file", type=Path, help="where to write pid, host, port and url once serving")
    add("--parent-pid", type=int, help="end when this process is gone")
    add("--threads", type=int, default=1, help="torch threads")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="weights and cache")
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: hold no weights, and refuse to generate, until some are pushed",
    )
    add("--max-running-requests", type=int, default=32, help="sequences decoded at once")
    add("--max-total-tokens", type=int, default=65536, help="token places of the cache")
    add("--record-dir", type=Path, help="append every finished generation to a file in this folder")
    add("--seed", type=int, default=0, help="seed of the sampling")
    return parser


def _check(args: argparse.Namespace) -> None:
    for name in ("threads", "max_running_requests", "max_total_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    if not args.model.is_dir():
        raise UserError(f"--model {args.model} is not a directory")


def serve(args: argparse.Namespace) -> int:
    """Bind, load, serve until a signal; returns the exit status.

    Raises:
        UserError: a flag, the port or the model directory is wrong.
    """
    _check(args)
    listener = bind(args.host, args.port)
    # Set before torch is imported, which is slow too: the port is checked first.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    from miles_core.engines.engine import Engine, EngineOptions
    from miles_core.engines.http import EngineApp

    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    options = EngineOptions(
        model=args.model.resolve(),
        load_format=args.load_format,
        dtype=args.dtype,
        max_running_requests=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        record_dir=args.record_dir,
        seed=args.seed,
    )
    failed = threading.Event()

    def died(_: BaseException) -> None:
        failed.set()
        os.kill(os.getpid(), signal.SIGTERM)

    engine = Engine(options, on_death=died)
    app = EngineApp(engine, served_name=options.model.name)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    server = Server(config, args.ready_file, args.parent_pid)
    # The HTTP thread must not wait long for the engine's thread, which holds the lock in bursts.
    sys.setswitchinterval(0.001)
    engine.start()
    server.run(sockets=[listener])
    engine.stop()
    return 1 if failed.is_set() else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit status 2 for a mistake of the caller, 75 for a port in use."""
    args = _parser().parse_args(argv)
    try:
        return serve(args)
    except UserError as error:
        print(f"engine: {error}", file=sys.stderr)
        return exit_status(error)


if __name__ == "__main__":
    sys.exit(main())
