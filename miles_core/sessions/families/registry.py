"""The names of the chat families, and where their notations are."""

from __future__ import annotations

import difflib
import importlib
from functools import cache

from miles_core.errors import UserError
from miles_core.sessions.families.notation import Notation

TEMPLATE = "template"
_HERE = "miles_core.sessions.families"
_NOTATIONS = {
    "qwen3": "qwen:Qwen3",
    "qwen3-thinking": "qwen:Qwen3Thinking",
    "qwen3-instruct": "qwen:Qwen3Instruct",
    "qwen3.5": "qwen35:Qwen35",
    "qwen3.6": "qwen35:Qwen36",
    "qwen3.5-nothink": "qwen35:Qwen35NoThink",
    "qwen2.5": "qwen:Qwen25",
    "glm45": "glm:Glm45",
    "glm47": "glm:Glm47",
    "llama3": "llama3:Llama3",
    "llama3.2": "llama3:Llama32",
    "llama3.0": "llama3:Llama30",
    "deepseek-v3": "deepseek:DeepSeekV3",
    "gpt-oss": "gptoss:GptOss",
    "smollm2": "chatml:SmolLm2",
    "chatml": "chatml:ChatMl",
    "terse": "terse:Terse",
}
FAMILIES = (*_NOTATIONS, TEMPLATE)
"""All names; `template` is a checkpoint's own template."""
_ALIASES = {
    "qwen25": "qwen2.5",
    "qwen3-instruct-2507": "qwen3-instruct",
    "qwen3-thinking-2507": "qwen3-thinking",
    "llama3.1": "llama3",
    "llama3-1": "llama3",
    "llama3-2": "llama3.2",
    "llama3-3": "llama3",
    "llama3.3": "llama3",
    "deepseek": "deepseek-v3",
    "deepseekv3": "deepseek-v3",
    "gptoss": "gpt-oss",
    "glm4.5": "glm45",
    "glm4.7": "glm47",
}


@cache
def notation(name: str) -> Notation:
    """The notation of a family, which has to be one of `FAMILIES` other than `template`."""
    module, _, kind = _NOTATIONS[name].partition(":")
    found: Notation = getattr(importlib.import_module(f"{_HERE}.{module}"), kind)()
    return found


def detectable() -> list[Notation]:
    """The notations that a checkpoint may be found to have, without those of a marker alone."""
    return [notation(name) for name in _NOTATIONS if name != "terse"]


def family_name(given: str) -> str:
    """The name in `FAMILIES` that is meant; raises UserError for an unknown one."""
    plain = given.strip().lower().replace("_", "-")
    plain = _ALIASES.get(plain, plain)
    if plain in FAMILIES:
        return plain
    close = difflib.get_close_matches(plain, [*FAMILIES, *_ALIASES], 1)
    meant = f"Did you mean {close[0]}? " if close else ""
    raise UserError(f"unknown chat family {given!r}", f"{meant}Known: auto, {', '.join(FAMILIES)}.")
