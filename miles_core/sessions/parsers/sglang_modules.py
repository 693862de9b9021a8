"""Importing SGLang's parsers, and nothing else of SGLang."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_LOG = logging.getLogger(__name__)
_PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.entrypoints",
    "sglang.srt.entrypoints.openai",
    "sglang.srt.function_call",
    "sglang.srt.parser",
)


class SglangModules(NamedTuple):
    """SGLang's classes, as it names them."""

    call_parser: Any
    reasoning_parser: Any
    tool: Any

    def calls(self, parser: str, tools: Sequence[dict[str, Any]], text: str) -> list[Any]:
        """What SGLang's parser of that name takes for calls; each has `name` and `parameters`."""
        read = self.call_parser([self.tool(**tool) for tool in tools], parser)
        return list(read.parse_non_stream(text)[1])

    def reasoning(self, parser: str, text: str, opened: bool) -> tuple[str, str]:
        """Reasoning and the rest, as SGLang's parser of that name divides `text`."""
        read = self.reasoning_parser(model_type=parser, force_reasoning=opened)
        reasoning, rest = read.parse_non_stream(text)
        return reasoning or "", rest or ""


@cache
def load_sglang() -> SglangModules | None:
    """SGLang's parsers, or None where it is not installed or cannot be imported (a warning).

    Importing `sglang` itself loads kernels and takes long. So, unless this process has done that,
    its packages are entered as empty ones, and only the files of the parsers are run (these load
    torch and transformers: some seconds, once). Such a process cannot use the rest of SGLang.
    """
    entered = [] if "sglang" in sys.modules else _enter_packages()
    if "sglang" not in sys.modules:
        return None
    try:
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        calls = importlib.import_module("sglang.srt.function_call.function_call_parser")
        reasoning = importlib.import_module("sglang.srt.parser.reasoning_parser")
        return SglangModules(calls.FunctionCallParser, reasoning.ReasoningParser, protocol.Tool)
    except (ImportError, AttributeError) as error:
        _LOG.warning("SGLang is installed, but its parsers cannot be used: %s", error)
        for name in entered:
            sys.modules.pop(name, None)
        return None


def _enter_packages() -> list[str]:
    """Names of SGLang's packages, now modules that have run no code; none if not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations))).parent
    for name in _PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    return list(_PACKAGES)
