"""Task directories: which there are, and what one of them asks of a sandbox."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from harbor.environments.definition import has_agent_environment_definition
from harbor.models.task.config import NetworkMode
from harbor.models.task.task import Task
from harbor.utils.env import get_required_host_vars
from pydantic import ValidationError

from miles_core.agent_server.protocol import id_problem, valid_id
from miles_core.agent_server.task_files import BadFiles, check_files
from miles_core.regular_files import why_unreadable
from miles_core.verdicts import Cause

NETWORK_COMMANDS = re.compile(
    r"\b(?:apt-get|apt|apk|dnf|yum)\s+(?:-\S+\s+)*(?:update|install|add)\b"
    r"|\b(?:curl|wget)\b[^|;&]*\b(?:https?|ftp)://(?!(?:localhost|127\.0\.0\.1|\[::1\]))"
    r"|\b(?:pip3?|uv\s+pip)\s+install\s+(?!.*--no-index)(?!-e\s+\.)(?!\.)"
    r"|\buvx\s|\buv\s+(?:sync|tool|add|run\s+--with)\b"
    r"|\b(?:npm|pnpm|yarn)\s+(?:install|ci|add)\b|\bnpx\s"
    r"|\bgit\s+clone\s+(?:https?|git|ssh)\b|\bcargo\s+(?:install|fetch)\b|\bgo\s+(?:get|install)\s"
)
"""Shell commands that fetch from the internet."""


SECRETS = frozenset({"HARBOR_ADMIN_SECRET", "MILES_SESSION_TOKEN"})
"""Variables of this server's environment that no task may read."""


class TaskProblem(Exception):
    """A task that cannot be run; `cause` is the verdict's."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class TasksGone(TaskProblem):
    """The tasks directory was there when the server was started, and is not now."""

    def __init__(self, root: Path) -> None:
        super().__init__(Cause.TASK_INVALID, f"tasks_dir gone: {root} is no directory any more")


@dataclass(frozen=True)
class TaskSet:
    """The tasks directory."""

    root: Path

    def ids(self) -> list[str]:
        """Every id with a directory that holds a task.toml; raises TasksGone."""
        try:
            entries = list(self.root.iterdir())
        except OSError as error:
            raise TasksGone(self.root) from error
        return sorted(
            entry.name
            for entry in entries
            if valid_id(entry.name) and (entry / "task.toml").is_file()
        )

    def directory(self, instance_id: str) -> Path:
        """The directory of a task; raises TaskProblem, also for a name that leads elsewhere."""
        if not valid_id(instance_id):
            raise TaskProblem(
                Cause.TASK_NOT_FOUND,
                f"{instance_id[:200]!r} is not a task id: {id_problem(instance_id)}",
            )
        if not self.root.is_dir():
            raise TasksGone(self.root)
        directory = self.root / instance_id
        if not directory.is_dir():
            raise TaskProblem(Cause.TASK_NOT_FOUND, f"no task {instance_id!r} in {self.root}")
        if not directory.resolve().is_relative_to(self.root.resolve()):
            raise TaskProblem(Cause.TASK_NOT_FOUND, f"{instance_id!r} leaves the tasks directory")
        return directory

    def load(self, instance_id: str) -> Task:
        """The parsed task; raises TaskProblem."""
        directory = self.directory(instance_id)
        if not (directory / "task.toml").exists():
            raise TaskProblem(Cause.TASK_INVALID, f"{directory} has no task.toml")
        try:
            check_files(directory)
            task = Task(directory)
        except BadFiles as error:
            text = str(error).encode("utf-8", "replace").decode()
            raise TaskProblem(Cause.TASK_INVALID, f"{directory}: {text}") from error
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            problem = f"{directory}/task.toml: {_wrong(error)}"
            raise TaskProblem(Cause.TASK_INVALID, problem) from error
        except Exception as error:  # whatever the parser makes of a file of unknown origin
            name = _missing(directory) if isinstance(error, FileNotFoundError) else None
            problem = f"{directory} has no {name}" if name else f"{directory}: {one_line(error)}"
            raise TaskProblem(Cause.TASK_INVALID, problem) from error
        _check_image(task)
        _check_limits(task)
        _check_variables(task)
        return task


def _wrong(error: tomllib.TOMLDecodeError | ValidationError) -> str:
    """What is wrong with a task.toml: its fields by their names, or the place in the file."""
    if not isinstance(error, ValidationError):
        return f"no TOML: {error}"
    fields = []
    for one in error.errors(include_url=False, include_input=False):
        name = ".".join(str(part) for part in one["loc"])
        fields.append(f"{name}: {one['msg'].removeprefix('Value error, ')}")
    return "; ".join(fields)[:400]


def _missing(directory: Path) -> str | None:
    """The first file that every task has and this one has not, by its name in the task."""
    steps = tomllib.loads((directory / "task.toml").read_text()).get("steps")
    roots = [f"steps/{step['name']}/" for step in steps] if steps else [""]
    for root in roots:
        if not (directory / root / "instruction.md").exists():
            return f"{root}instruction.md"
        if not any((directory / place / "tests/test.sh").exists() for place in (root, "")):
            return f"{root}tests/test.sh"
    return None


def _check_image(task: Task) -> None:
    """Raise TaskProblem for a task that does not say what its sandbox is made of."""
    directory, image = task.paths.environment_dir, task.config.environment.docker_image
    if not has_agent_environment_definition(directory, docker_image=image):
        missing = "Dockerfile or docker-compose.yaml in environment/"
        if not directory.is_dir():
            missing = "environment/ with a Dockerfile or docker-compose.yaml"
        raise TaskProblem(
            Cause.TASK_INVALID,
            f"{task.paths.task_dir} has no {missing}, and task.toml no docker_image",
        )


def _check_limits(task: Task) -> None:
    """Raise TaskProblem for a time limit in which nothing can be done."""
    config = task.config
    limits = {
        "agent.timeout_sec": config.agent.timeout_sec,
        "verifier.timeout_sec": config.verifier.timeout_sec,
        "environment.build_timeout_sec": config.environment.build_timeout_sec,
    }
    for step in config.steps or []:
        limits[f"steps.{step.name}.agent.timeout_sec"] = step.agent.timeout_sec
        limits[f"steps.{step.name}.verifier.timeout_sec"] = step.verifier.timeout_sec
    if "\0" in (config.environment.workdir or ""):
        raise TaskProblem(Cause.TASK_INVALID, f"{task.paths.config_path}: workdir is no path")
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise TaskProblem(
                Cause.TASK_INVALID, f"{task.paths.config_path}: {name} = {value:g} is not above 0"
            )
    for name in ("memory_mb", "storage_mb", "cpus"):  # 0 is the default, as for Docker
        value = getattr(config.environment, name)
        if value is not None and not value >= 0:
            raise TaskProblem(
                Cause.TASK_INVALID, f"{task.paths.config_path}: {name} = {value:g} is below 0"
            )


def _check_variables(task: Task) -> None:
    """Raise TaskProblem for what cannot be a variable, or is one of this host's that a task must
    not or cannot have.

    Harbor puts a variable of this process in the place of `"${NAME}"` in a table `env`.
    """
    config = task.config
    tables = {"environment.env": config.environment.env, "verifier.env": config.verifier.env}
    tables["solution.env"] = config.solution.env
    for step in config.steps or []:
        tables[f"steps.{step.name}.verifier.env"] = step.verifier.env
    for table, values in tables.items():
        for name, value in values.items():
            if not name or "=" in name or "\0" in name + value:
                raise TaskProblem(
                    Cause.TASK_INVALID,
                    f"{task.paths.config_path}: {name!r} in {table} can be no variable",
                )
        for name, default in get_required_host_vars(values):
            if name in SECRETS:
                problem = "is a secret of this server"
            elif name not in os.environ and default is None:
                problem = "is not set where the agent server runs"
            else:
                continue
            raise TaskProblem(
                Cause.TASK_INVALID, f"{task.paths.config_path}: ${{{name}}} in {table} {problem}"
            )


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as one line for a person."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:limit]


def verifier_needs_no_network(task: Task) -> bool:
    """Whether the task declares that none of its verifiers has a network."""
    if task.config.environment.network_mode is not NetworkMode.NO_NETWORK:
        return False
    return all(mode in (None, NetworkMode.NO_NETWORK) for mode in _verifier_modes(task).values())


def _verifier_modes(task: Task) -> dict[str, NetworkMode | None]:
    """What each `verifier` table says of the network; None where it says nothing."""
    modes = {"verifier": task.config.verifier.network_mode}
    for step in task.config.steps or []:
        modes[f"steps.{step.name}.verifier"] = step.verifier.network_mode
    return modes


def check_for_bubblewrap(task: Task, agent_name: str) -> None:
    """Raise TaskProblem when a task asks for what the bubblewrap sandbox does not have.

    A task whose tests fetch from the internet would be graded zero whatever the agent did, so it
    is refused before it is run, unless it declares itself that it needs no network.
    """
    config = task.config
    problem = None
    if config.environment.gpus:
        problem = f"task.toml: gpus = {config.environment.gpus}"
    elif config.environment.tpu is not None:
        problem = "task.toml: tpu"
    elif config.environment.mcp_servers:
        problem = "task.toml: mcp_servers"
    elif config.environment.network_mode is not NetworkMode.NO_NETWORK:
        names = ["tests", "solution"] if agent_name == "oracle" else ["tests"]
        roots = [task.paths.task_dir, *sorted(task.paths.task_dir.glob("steps/*"))]
        directories = [root / name for root in roots for name in names]
        problem = network_need(task.paths.task_dir, directories)
    else:
        for table, mode in _verifier_modes(task).items():
            if mode not in (None, NetworkMode.NO_NETWORK):
                problem = f"task.toml: network_mode = {mode.value!r} of {table}"
    if problem:
        raise TaskProblem(
            Cause.SANDBOX_UNSUPPORTED,
            f"{problem}: not in the bubblewrap sandbox; use --sandbox docker",
        )


def network_need(root: Path, directories: list[Path]) -> str | None:
    """The first line of the shell scripts in `directories` that needs the internet."""
    for directory in directories:
        found = directory.rglob("*.sh") if directory.is_dir() else []
        for script in sorted(path for path in found if why_unreadable(path) is None):
            for number, line in enumerate(script.read_text(errors="replace").splitlines(), 1):
                code = line.split(" #")[0].strip()
                if not code.startswith("#") and NETWORK_COMMANDS.search(code):
                    place = script.relative_to(root)
                    return f"{place} line {number} needs the internet ({code[:120]})"
    return None
