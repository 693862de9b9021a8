"""The engine's own record of what it generated, one JSON line for each finished request."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from miles_core.engines.request import Request


class Recorder:
    """Appends to `generations-<pid>.jsonl` in a directory; each line is written whole."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"generations-{os.getpid()}.jsonl"
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the engine

    def write(self, request: Request, version: str) -> None:
        """Record a finished request under the version of its last token."""
        self.file.write(
            orjson.dumps(
                {
                    "rid": request.rid,
                    "weight_version": int(request.version(version)),
                    "input_len": len(request.input_ids),
                    "output_ids": request.output_ids,
                    "output_logprobs": request.output_logprobs,
                    "finish_reason": request.finish,
                    "weight_versions": [
                        {"version": v, "start": start, "end": end}
                        for v, start, end in request.spans
                    ],
                }
            )
            + b"\n"
        )

    def close(self) -> None:
        self.file.close()
