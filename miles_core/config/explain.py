"""Pydantic's validation errors as lines for a person."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from miles_core.config.keys import all_keys
from miles_core.config.presets import preset_names

_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_KINDS = {
    "int_parsing": "an integer",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
}


def validation_lines(error: ValidationError, origins: dict[str, str]) -> list[str]:
    """One line for each problem: `origin: dotted.key: must be >= 1, is 0`."""
    lines: list[str] = []
    for detail in error.errors():
        dotted = ".".join(str(part) for part in detail["loc"][:2])
        if dotted in all_keys():
            lines.append(f"{_origin(dotted, origins)}{dotted}: {_problem(detail, dotted)}")
        else:  # rules between fields: each line of the message starts with its key
            for line in str(detail["ctx"]["error"]).splitlines():
                lines.append(f"{_origin(line.partition(':')[0], origins)}{line}")
    return list(dict.fromkeys(lines))


def missing_preset_hint() -> str:
    """What to do when required values are missing and no preset was given."""
    return f"start from a preset with --preset, one of: {', '.join(preset_names())}"


def _origin(dotted: str, origins: dict[str, str]) -> str:
    origin = origins.get(dotted, "default")
    return "" if origin == "default" else f"{origin}: "


def _problem(detail: ErrorDetails, dotted: str) -> str:
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "missing":
        key = all_keys()[dotted]
        return f"is required; set {key.flag}, {key.env}, or {key.name} in [{key.section}]"
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"must be {sign} {context[name]:g}, is {value}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, is {value!r}"
    if kind == "literal_error":
        return f"must be one of {', '.join(all_keys()[dotted].choices)}, is {value!r}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, is {value!r}"
    return f"{detail['msg']}, is {value!r}"
