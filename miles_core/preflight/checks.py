"""Checks before anything is spent: paths, programs, ports, disk, services, tasks, time limits.

Every check returns all problems that it finds, and `PreflightError` shows them together.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from miles_core.agent_server.client import (
    AgentServerClient,
    AgentServerError,
    AgentServerUnreachable,
)
from miles_core.agent_server.protocol import Health
from miles_core.config.keys import nearest
from miles_core.config.layout import layout_error, read_model_shape
from miles_core.config.lora import module_fault, possible_modules
from miles_core.config.schema import MilesConfig
from miles_core.errors import UserError
from miles_core.preflight import starting_points
from miles_core.preflight.model_files import model_faults
from miles_core.preflight.routing import dense_model_fault, engine_fault
from miles_core.sessions.families import load_family

LEAST_FREE_BYTES = 1 << 30
# A checkpoint holds float32 weights and two AdamW moments: 12 bytes for each parameter, which a
# bfloat16 Hugging Face file stores in 2.
CHECKPOINT_GROWTH = 6
_SHOWN_IDS = 10
_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Problem:
    """One thing that would make the run fail: the key it belongs to, what is wrong, what to do."""

    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}\n    {self.fix}"


class PreflightError(UserError):
    """The run cannot succeed as it is; `problems` has every reason that was found."""

    def __init__(self, problems: list[Problem]) -> None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"the run cannot start:\n{lines}")
        self.problems = problems


@dataclass
class AgentServerReport:
    """What an agent server says of itself, and what does not fit the run."""

    health: Health | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def require(problems: list[Problem]) -> None:
    """Raise PreflightError when there is any problem."""
    if problems:
        raise PreflightError(problems)


def check_local(config: MilesConfig) -> list[Problem]:
    """Everything that can be checked on this machine alone."""
    return [
        *check_paths(config),
        *check_programs(config),
        *check_ports(config),
        *check_disk(config),
        *check_offload(config),
    ]


def check_paths(config: MilesConfig) -> list[Problem]:
    """Inputs exist and have the right kind."""
    problems = _need(config.data.prompt_data, "data.prompt_data", "set --prompt-data to the rows")
    if config.data.eval_prompt_data is not None:
        fix = "set --eval-prompt-data to held-out rows"
        problems += _need(config.data.eval_prompt_data, "data.eval_prompt_data", fix)
    model, server = config.model, config.agent_server
    if model.hf_checkpoint is not None:
        fix = (
            "set --hf-checkpoint to a Hugging Face directory of a supported family with "
            "config.json, tokenizer.json and .safetensors weights"
        )
        problems += _need(model.hf_checkpoint, "model.hf_checkpoint", fix, kind="dir")
        if model.hf_checkpoint.is_dir():
            faults = model_faults(model.hf_checkpoint, not config.engine.engine_urls)
            problems += [Problem("model.hf_checkpoint", fault, fix) for fault in faults]
            problems += [] if faults else check_model(config, model.hf_checkpoint)
    elif model.model_recipe is not None:
        fix = "set --model-recipe to a TOML recipe, or --hf-checkpoint to a model"
        problems += _need(model.model_recipe, "model.model_recipe", fix, kind="file")
    for name, directory in starting_points.given(config).items():
        fix = _starting_point_fix(name)
        problems += _need(directory, f"model.{name}", fix, kind="dir")
        if directory.is_dir() and (fault := starting_points.directory_fault(directory, name)):
            problems.append(Problem(f"model.{name}", fault, fix))
    if server.agent_server_url is None:
        fix = "set --tasks-dir to a folder of Harbor tasks"
        problems += _need(server.tasks_dir, "agent_server.tasks_dir", fix, kind="dir")
        if server.agent_config is not None:
            fix = "set --agent-config to a YAML file, or leave it out"
            problems += _need(server.agent_config, "agent_server.agent_config", fix, kind="file")
    return problems


def check_model(config: MilesConfig, directory: Path) -> list[Problem]:
    """Whether the settings fit this Hugging Face model: layout, adapters, chat family, routing,
    and where reference and critic start from."""
    dense = dense_model_fault(config, directory)
    others = {
        name: starting_points.other_model_fault(path, directory)
        for name, path in starting_points.given(config).items()
        if (path / "metadata.json").is_file()
    }
    return [
        *_family_problems(config, directory),
        *_layout_problems(config, directory),
        *([] if dense is None else [Problem(*dense)]),
        *_adapter_problems(config, directory),
        *(Problem(f"model.{n}", f, _starting_point_fix(n)) for n, f in others.items() if f),
    ]


def _starting_point_fix(name: str) -> str:
    flag = "--" + name.replace("_", "-")
    return f"set {flag} to a torch_dist directory of the policy's kind, or leave it out"


def _layout_problems(config: MilesConfig, directory: Path) -> list[Problem]:
    """Whether the trainer's ranks can hold the model as they are to be laid out."""
    training = config.training
    fault = layout_error(training.num_trainer_ranks, training, read_model_shape(directory))
    fix = "set the sizes of a possible layout, or another --num-trainer-ranks"
    return [] if fault is None else [Problem("training.num_trainer_ranks", fault, fix)]


def _adapter_problems(config: MilesConfig, directory: Path) -> list[Problem]:
    """Whether the model has the layers that are to get an adapter."""
    fault = module_fault(config.training.target_modules, possible_modules(directory))
    fix = "set --target-modules to layers of the model, or leave it out"
    return [] if fault is None else [Problem("training.target_modules", fault, fix)]


def check_programs(config: MilesConfig) -> list[Problem]:
    """What an own agent server needs to be installed."""
    server = config.agent_server
    if server.agent_server_url is not None:
        return []
    problems = []
    if server.agent_python is not None and not os.access(server.agent_python, os.X_OK):
        problems.append(
            Problem(
                "agent_server.agent_python",
                f"{server.agent_python} is not a program that can be run",
                "set --agent-python to the Python of the agent-server environment; "
                "`make setup` makes one",
            )
        )
    if server.sandbox in ("bubblewrap", "docker"):
        program = {"bubblewrap": "bwrap"}.get(server.sandbox, server.sandbox)
        if shutil.which(program) is None:
            text = f"{server.sandbox} needs the program {program}, which is not installed"
            fix = f"run `make setup`, or install {server.sandbox} with the system's packages"
            problems.append(Problem("agent_server.sandbox", text, fix))
    return problems


def check_offload(config: MilesConfig) -> list[Problem]:
    """Offload is for GPUs; a cluster of the run's own has those of this machine."""
    devices = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    if not config.training.optimizer_cpu_offload or config.cluster.ray_address or devices:
        return []
    text = "this machine has no GPU, so the optimizer's state is in host memory as it is"
    return [Problem("training.optimizer_cpu_offload", text, "leave --optimizer-cpu-offload out")]


def check_ports(config: MilesConfig) -> list[Problem]:
    """The address of services is this machine's, and fixed ports are free."""
    sessions = config.sessions
    first = sessions.session_server_port
    ports = [0] if first is None else range(first, first + sessions.session_server_workers)
    for port in ports:
        if port > 65535:
            text = f"{sessions.session_server_workers} workers from port {first} go beyond 65535"
            fix = "set a lower --session-server-port"
            return [Problem("sessions.session_server_port", text, fix)]
        try:
            _try_bind(sessions.miles_host_ip, port)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                reason = "in use" if error.errno == errno.EADDRINUSE else "not allowed"
                text = f"port {port} on {sessions.miles_host_ip} is {reason}"
                fix = "set another --session-server-port, or leave it out for free ports"
                return [Problem("sessions.session_server_port", text, fix)]
            text = f"{sessions.miles_host_ip} is no address of this machine ({error.strerror})"
            return [Problem("sessions.miles_host_ip", text, "set --miles-host-ip to one of it")]
    return []


def _try_bind(host: str, port: int) -> None:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def check_disk(config: MilesConfig) -> list[Problem]:
    """The run's folders can be written, and the checkpoints that are kept have room."""
    run, model = config.run, config.model
    weights = 0
    if model.hf_checkpoint is not None and model.hf_checkpoint.is_dir():
        weights = sum(f.stat().st_size for f in model.hf_checkpoint.glob("*.safetensors"))
    checkpoints = weights * CHECKPOINT_GROWTH * (run.keep_checkpoints + 1)
    folders: dict[str, tuple[Path | None, int]] = {
        "run.runs_dir": (run.runs_dir, 0 if run.save_dir else checkpoints),
        "run.save_dir": (run.save_dir, checkpoints),
        "run.save_traces_dir": (run.save_traces_dir, 0),
        "model.cache_dir": (model.cache_dir, weights * 2),
    }
    problems = []
    for name, (folder, needed) in folders.items():
        if folder is None:
            continue
        flag = "--" + name.split(".")[1].replace("_", "-")
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        usage = shutil.disk_usage(existing)
        writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        if not writable or not usage.total:  # such as /proc, which holds no files of ours
            text = f"{folder} cannot be written (see {existing})"
            problems.append(Problem(name, text, f"set {flag} to a folder of yours"))
            continue
        needed = max(needed, LEAST_FREE_BYTES)
        if usage.free < needed:
            free, least = usage.free / 1e9, needed / 1e9
            text = f"{existing} has {free:.1f} GB free and about {least:.1f} are needed"
            fix = f"free some, set {flag} to another disk, or lower --keep-checkpoints"
            problems.append(Problem(name, text, fix))
    return problems


def check_task_ids(instance_ids: Iterable[str], tasks: Iterable[str], where: str) -> list[Problem]:
    """Every id of the rows has a task; `where` says whose tasks they are."""
    known = set(tasks)
    missing = sorted(set(instance_ids) - known)
    if not missing:
        return []
    shown = []
    for name in missing[:_SHOWN_IDS]:
        similar = nearest(name, known)
        shown.append(f"{name} (did you mean {similar}?)" if similar else name)
    more = f" and {len(missing) - _SHOWN_IDS} more" if len(missing) > _SHOWN_IDS else ""
    return [
        Problem(
            "data.prompt_data",
            f"{len(missing)} task ids of the rows have no directory in {where}: "
            f"{', '.join(shown)}{more}",
            "correct metadata.instance_id of these rows, or set --tasks-dir to the folder that "
            "has the tasks",
        )
    ]


def local_tasks(tasks_dir: Path) -> set[str]:
    """The names of the task directories of a folder."""
    return {entry.name for entry in os.scandir(tasks_dir) if entry.is_dir()}


async def check_agent_server(
    config: MilesConfig, url: str, token: str | None, instance_ids: Iterable[str]
) -> AgentServerReport:
    """The agent server answers, has capacity, has every task, and gives up before its client.

    A trial must end in this order: the agent's limit, the server's limit for the whole trial, the
    client's. Otherwise a trial that is still graded would be given up.
    """
    report = AgentServerReport()
    start = "start it with `miles-agent-server`, or leave --agent-server-url out for an own one"
    try:
        async with AgentServerClient(url, token) as client:
            health = report.health = await client.health()
            tasks = await client.tasks()
    except AgentServerUnreachable as error:
        text = f"no agent server answers at {url}: {error}"
        report.problems.append(Problem("agent_server.agent_server_url", text, start))
        return report
    except AgentServerError as error:
        fix = start
        if error.status in (401, 403):
            fix = "set HARBOR_ADMIN_SECRET to the secret that the server was started with"
        report.problems.append(Problem("agent_server.agent_server_url", f"{url}: {error}", fix))
        return report
    report.problems += _health_problems(config, url, health)
    where = f"the agent server at {url} ({health.tasks_dir})"
    report.problems += check_task_ids(instance_ids, tasks, where)
    wanted = config.rollout.max_concurrent_trials
    if wanted is not None and wanted > health.capacity:
        report.warnings.append(
            f"rollout.max_concurrent_trials: {wanted} is above the capacity of the agent server "
            f"({health.capacity}); the others wait in its queue"
        )
    return report


def _health_problems(config: MilesConfig, url: str, health: Health) -> list[Problem]:
    problems = []
    if health.status != "ready" or health.capacity < 1:
        text = f"{url} is {health.status} with a capacity of {health.capacity}"
        fix = "wait until it is ready, or start it with --max-concurrent of at least 1"
        problems.append(Problem("agent_server.agent_server_url", text, fix))
    agent_s, trial_s = health.agent_timeout_s, health.trial_timeout_s
    client_s = config.agent_server.agent_trial_timeout
    if agent_s >= trial_s:
        text = (
            f"the server ends a trial after {trial_s:g} s, but an agent may take {agent_s:g} s, "
            "so slow trials are never graded"
        )
        fix = f"start the agent server with --agent-timeout below {trial_s:g}"
        problems.append(Problem("agent_server.agent_timeout", text, fix))
    if trial_s >= client_s:
        text = (
            f"the client gives a trial up after {client_s:g} s, but the server allows {trial_s:g} s"
        )
        fix = f"set --agent-trial-timeout above {trial_s:g}, such as {trial_s + 60:g}"
        problems.append(Problem("agent_server.agent_trial_timeout", text, fix))
    return problems


async def check_services(config: MilesConfig) -> list[Problem]:
    """Engines and the Ray dashboard that the configuration names answer."""
    wanted = [
        ("engine.engine_urls", url, f"{url.rstrip('/')}/health", "start the engine there")
        for url in config.engine.engine_urls
    ]
    ray = config.cluster.ray_address
    if ray is not None:
        fix = "start Ray there, or leave --ray-address out for an own head"
        wanted.append(("cluster.ray_address", ray, f"{ray.rstrip('/')}/api/version", fix))
    problems = []
    async with httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, trust_env=False) as http:
        for name, url, probe, fix in wanted:
            try:
                answer = await http.get(probe)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = str(error) or type(error).__name__
                problems.append(Problem(name, f"nothing answers at {url}: {reason}", fix))
                continue
            if answer.status_code >= 400:
                text = f"{probe} answers {answer.status_code}"
                problems.append(Problem(name, text, fix))
            elif name == "engine.engine_urls":
                problems += await _routing_problems(config, url, http)
    return problems


async def _routing_problems(
    config: MilesConfig, url: str, http: httpx.AsyncClient
) -> list[Problem]:
    try:
        fault = await engine_fault(config, url, http)
    except httpx.HTTPError as error:
        fault = f"{url} gave no answer to a prompt: {error!r}"
    if fault is None:
        return []
    fix = (
        "start it with --enable-return-routed-experts and this model, or leave out "
        "--use-rollout-routing-replay"
    )
    return [Problem("training.use_rollout_routing_replay", fault, fix)]


def _family_problems(config: MilesConfig, checkpoint: Path) -> list[Problem]:
    """Whether sessions know how the model's conversations are written."""
    try:
        load_family(checkpoint, config.sessions.chat_family)
    except UserError as error:
        return [Problem("sessions.chat_family", error.message, error.fix or "")]
    return []


def _need(path: Path, name: str, fix: str, kind: str = "any") -> list[Problem]:
    if not path.exists():
        return [Problem(name, f"{path} does not exist", fix)]
    if kind == "dir" and not path.is_dir():
        return [Problem(name, f"{path} is not a folder", fix)]
    if kind == "file" and not path.is_file():
        return [Problem(name, f"{path} is not a file", fix)]
    return []
