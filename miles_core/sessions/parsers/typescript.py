"""Definitions of tools as gpt-oss was trained to read them: types in the way of TypeScript.

The text, odd line breaks in nested objects included, is that of the checkpoint's template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.sessions.messages import clean_text
from miles_core.sessions.parsers.text import json_text

_PLAIN = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM = 50
_DEEPEST = 40


def render_namespace(name: str, tools: Sequence[dict[str, Any]]) -> str:
    """The section of the namespace `name` with one type for each tool."""
    body = "".join(_tool(_dict(tool.get("function"))) for tool in tools)
    return clean_text(f"## {name}\n\nnamespace {name} {{\n\n{body}}} // namespace {name}")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _required(schema: dict[str, Any]) -> list[Any]:
    found = schema.get("required")
    return found if isinstance(found, list) else []


def _tool(function: dict[str, Any]) -> str:
    described = function.get("description")
    comment = f"// {described}\n" if isinstance(described, str) else ""
    parameters = _dict(function.get("parameters"))
    properties = _dict(parameters.get("properties"))
    arguments = "".join(
        _parameter(key, _dict(schema), key in _required(parameters))
        for key, schema in properties.items()
    )
    taken = f"(_: {{\n{arguments}}})" if arguments else "()"
    return f"{comment}type {function.get('name', '')} = {taken} => any;\n\n"


def _parameter(name: str, schema: dict[str, Any], required: bool) -> str:
    comment = f"// {schema['description']}\n" if schema.get("description") else ""
    default = ""
    if "default" in schema:
        comma = "" if schema.get("oneOf") and not schema.get("enum") else ", "
        default = f"{comma}// default: {_default(schema)}"
    return f"{comment}{name}{'' if required else '?'}: {render_type(schema)}{default},\n"


def _default(schema: dict[str, Any]) -> str:
    """A default value: bare where the type lists its values, else JSON."""
    value = schema["default"]
    bare = isinstance(value, str) and (schema.get("enum") or schema.get("oneOf"))
    return str(value) if bare else json_text(value)


def render_type(schema: dict[str, Any], depth: int = 0) -> str:
    """The type of a JSON schema; `any` for what has no form, and for what is nested too deeply."""
    kind = schema.get("type")
    null = " | null" if schema.get("nullable") else ""
    if depth > _DEEPEST:
        return "any"
    if kind == "array":
        return _array(_dict(schema.get("items")), depth) + null
    if isinstance(kind, list) and kind:
        return " | ".join(str(one) for one in kind)
    if isinstance(schema.get("oneOf"), list) and schema["oneOf"]:
        return " | \n".join(_variant(_dict(one), depth) for one in schema["oneOf"])
    if kind == "string" and isinstance(schema.get("enum"), list) and schema["enum"]:
        return " | ".join(f'"{choice}"' for choice in schema["enum"])
    if kind == "string":
        return "string" + null
    if kind == "object":
        return _object(schema, depth)
    return _PLAIN.get(str(kind), "any")


def _array(items: dict[str, Any], depth: int) -> str:
    if str(items.get("type")) in _PLAIN:
        return f"{_PLAIN[items['type']]}[]"
    inner = render_type(items, depth + 1) if items else "any"
    simple = inner != "object | object" and len(inner) <= _LONGEST_ITEM
    return f"{inner}[]" if simple else "any[]"


def _object(schema: dict[str, Any], depth: int) -> str:
    properties = _dict(schema.get("properties"))
    if not properties:
        return "object"
    fields = (
        f"{key}{'' if key in _required(schema) else '?'}: \n{' ' * 16}"
        f"{render_type(_dict(inner), depth + 1)}"
        for key, inner in properties.items()
    )
    return "{\n" + ", ".join(fields) + "}"


def _variant(schema: dict[str, Any], depth: int) -> str:
    comment = f"// {schema['description']}" if schema.get("description") else ""
    if "default" in schema:
        comment += f"{' ' * 20}// default: {json_text(schema['default'])}"
    return render_type(schema, depth + 1) + comment
