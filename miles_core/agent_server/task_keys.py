"""Keys of a task.toml that Harbor reads over without a word, most often misspelt ones."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from harbor.models.task.config import EnvironmentConfig, TaskConfig
from pydantic import BaseModel

_OLDER: dict[type[BaseModel], dict[str, type]] = {
    TaskConfig: {"version": object},
    EnvironmentConfig: {"memory": str, "storage": str},
}
"""Names of earlier formats that Harbor still takes, with the only type that it takes them in."""


def ignored_keys(path: Path) -> list[str]:
    """One line for each key of a task.toml without a meaning; the file is one that Harbor takes."""
    return list(_ignored(TaskConfig, tomllib.loads(path.read_text("utf-8")), ""))


def _ignored(model: type[BaseModel], values: dict[str, Any], where: str) -> Iterator[str]:
    older = _OLDER.get(model, {})
    for key, value in values.items():
        name = f"{where}{key}"
        if key in older:
            if not isinstance(value, older[key]):
                yield f"task.toml: {name} = {value!r} is ignored: write it as text, such as '2G'"
            continue
        if key not in model.model_fields:
            near = difflib.get_close_matches(key, [*model.model_fields, *older], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"task.toml: {name} means nothing to Harbor and is ignored{hint}"
            continue
        inner = _model_of(model.model_fields[key].annotation)
        if inner is not None:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    yield from _ignored(inner, part, f"{name}.")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `Inner`, `Inner | None` or `list[str | Inner]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for part in get_args(annotation) if (m := _model_of(part))), None)
