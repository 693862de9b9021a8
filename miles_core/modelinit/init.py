"""`init_model` makes a model from a recipe; `ensure_model` makes it once and then finds it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import UserError
from miles_core.modelinit.recipe import Recipe, load_recipe
from miles_core.runs.files import fingerprint, read_json, write_json

INFO_FILE = "miles_model.json"
OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ModelInfo:
    """A finished model.

    `success` is the share of fresh goals that it reached when it was measured last, `fingerprint`
    that of everything that decided it, and `files` the digest of each file.
    """

    path: str
    fingerprint: str
    parameters: int
    vocab_size: int
    steps: int
    loss: float
    success: float | None
    reached_target: bool
    seconds: float
    files: dict[str, str]
    made: bool = True


def recipe_fingerprint(recipe: Recipe) -> str:
    """Of the recipe, the tasks, the prompts, and the code that makes demonstrations of them."""
    import miles_core.modelinit
    from miles_core.sessions.families.terse import TEMPLATE

    values = recipe.model_dump(mode="json", exclude={"tasks_dir", "agent_config"})
    code = sorted(Path(miles_core.modelinit.__path__[0]).glob("*.py"))
    sources = [recipe.tasks_dir, recipe.agent_config, TEMPLATE, *code]
    return fingerprint([values, [fingerprint(path) for path in sources]])


def model_info(directory: Path) -> ModelInfo | None:
    """What `directory` holds if it is a complete model of ours with unchanged files, else None."""
    try:
        info = ModelInfo(**read_json(directory / INFO_FILE))
        intact = all(fingerprint(directory / name) == d for name, d in info.files.items())
    except (OSError, ValueError, TypeError):
        return None
    return dataclasses.replace(info, path=str(directory), made=False) if intact else None


def init_model(
    recipe_path: Path, out_dir: Path, on_progress: OnProgress | None = None
) -> ModelInfo:
    """Make the recipe's model in `out_dir`, which appears complete or not at all.

    `on_progress` gets dictionaries with `step`, `steps`, `loss`, `success`, `seconds` and `eta_s`
    (the time to the last allowed step: it may end well before). Raises UserError when the recipe
    is wrong or something else is at `out_dir`, RuntimeError when the training fails.
    """
    recipe_path, out_dir = Path(recipe_path), Path(out_dir)
    recipe = load_recipe(recipe_path)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} already holds something", "Give an empty or a new folder.")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as name:
        made = Path(name) / "model"
        result = _run(recipe_path, made, Path(name) / "work", recipe, on_progress)
        info = ModelInfo(
            path=str(out_dir),
            fingerprint=recipe_fingerprint(recipe),
            files={p.name: fingerprint(p) for p in sorted(made.iterdir())},
            **result,
        )
        write_json(made / INFO_FILE, dataclasses.asdict(info))
        if out_dir.exists():
            out_dir.rmdir()
        os.replace(made, out_dir)
    return info


def ensure_model(
    recipe_path: Path, cache_dir: Path, on_progress: OnProgress | None = None
) -> ModelInfo:
    """The recipe's model from `cache_dir`; it is made when it is not there, incomplete or damaged.

    The folder's name carries the fingerprint of all that decides the model. Only one process makes
    it; others wait.
    """
    recipe_path, cache_dir = Path(recipe_path), Path(cache_dir)
    key = recipe_fingerprint(load_recipe(recipe_path))
    out_dir = cache_dir / f"model-{recipe_path.stem}-{key[:16]}"
    with _lock(cache_dir / f".{out_dir.name}.lock"):
        found = model_info(out_dir)
        if found is not None and found.fingerprint == key:
            return found
        shutil.rmtree(out_dir, ignore_errors=True)
        return init_model(recipe_path, out_dir, on_progress)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(
    recipe_path: Path, output: Path, work: Path, recipe: Recipe, on_progress: OnProgress | None
) -> dict[str, Any]:
    """Train in a child process, so that its process groups and threads end with it."""
    command = [sys.executable, "-m", "miles_core.modelinit.warm", "--recipe", str(recipe_path)]
    command += ["--output", str(output), "--work", str(work)]
    env = {**os.environ, "OMP_NUM_THREADS": str(recipe.warm_start.threads)}
    result: dict[str, Any] | None = None
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            assert child.stdout is not None
            for line in child.stdout:
                message = _message(line)
                if "result" in message:
                    result = message["result"]
                elif message and on_progress is not None:
                    on_progress(message)
            status = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        errors.seek(0)
        said = errors.read()[-2000:]
    if status or result is None:
        raise RuntimeError(f"the warm start ended with status {status}:\n{said}")
    return result


def _message(line: str) -> dict[str, Any]:
    """A line of the child's as an object; empty for what a library printed."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
