"""The run directory: the paths of its parts, its identity and its configuration."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles_core.errors import UserError
from miles_core.runs.files import read_json, write_json

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

_OWNER = ".miles_run.json"


class RunDir:
    """A run's directory; the object alone touches nothing on the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self._config: MilesConfig | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | Path, config: MilesConfig, fingerprints: dict[str, str]) -> RunDir:
        """Make a new run; `run.json` is written last and makes it one.

        `fingerprints` name what the run was made from (data, model, tasks, ...).
        Raises UserError when the path is a run already, when `save_dir` or `save_traces_dir`
        belong to another run, or when a URL in the configuration carries a password.
        """
        run = cls(path)
        if run.exists():
            raise UserError(
                f"{run.path} is a run already",
                f"Go on with it: `miles resume {run.path}`; or choose another --run-name.",
            )
        _refuse_secrets(config)
        from importlib.metadata import version

        run_id = uuid.uuid4().hex
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.config_json, config)
        run._config = config
        for folder in {run.checkpoints, run.rollout_data.parent} - {run.path}:
            if run.path not in folder.parents:
                _claim(folder, run_id, run.path)
        for folder in (run.attempts, run.trials, run.rollout_data, run.train_data, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(
            run.run_json,
            {
                "id": run_id,
                "name": run.path.name,
                "created": time.time(),
                "code_version": version("miles-flow"),
                "fingerprints": fingerprints,
            },
        )
        return run

    def exists(self) -> bool:
        """Whether this is a run: `run.json` decides, nothing else."""
        return self.run_json.is_file()

    def identity(self) -> dict[str, Any]:
        """The content of `run.json`: id, name, created, code_version, fingerprints."""
        try:
            content: dict[str, Any] = read_json(self.run_json)
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is not a run: it has no run.json",
                "Give the path of a run, its name under runs/, or `latest`.",
            ) from None
        return content

    def load_config(self) -> MilesConfig:
        """The configuration that the run was made with, or last resumed with."""
        from pydantic import ValidationError

        from miles_core.config.schema import MilesConfig

        try:
            return MilesConfig.model_validate_json(self.config_json.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.path} has no config.json", "Give the path of a run.") from None
        except ValidationError as error:
            raise UserError(
                f"{self.config_json} does not fit this version of Miles Flow: {error}",
                "Use the version named in run.json as code_version.",
            ) from error

    def save_config(self, config: MilesConfig) -> None:
        """Replace the configuration (a resume with allowed changes)."""
        _refuse_secrets(config)
        write_json(self.config_json, config)
        self._config = config

    def _moved(self, key: str) -> Path | None:
        """A folder that the configuration moves out of the run; read without pydantic's cost."""
        if self._config is not None:
            value = getattr(self._config.run, key)
        elif self.config_json.is_file():
            value = json.loads(self.config_json.read_bytes()).get("run", {}).get(key)
        else:
            value = None
        return Path(value).absolute() if value else None

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    @property
    def agent_server(self) -> Path:
        return self.path / "agent_server"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine_log"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints: `--save-dir` or RUN/checkpoints."""
        return self._moved("save_dir") or self.path / "checkpoints"

    @property
    def rollout_data(self) -> Path:
        """What steps trained on: under `--save-traces-dir` or RUN."""
        return (self._moved("save_traces_dir") or self.path) / "rollout_data"

    @property
    def train_data(self) -> Path:
        """What the trainer computed: under `--save-traces-dir` or RUN."""
        return (self._moved("save_traces_dir") or self.path) / "train_data"

    def rollout_path(self, step: int) -> Path:
        return self.rollout_data / f"{step}.pt"

    def train_dir(self, step: int) -> Path:
        return self.train_data / str(step)

    def trial_dir(self, trial_id: str) -> Path:
        return self.trials / trial_id

    def trajectory_path(self, trial_id: str) -> Path:
        return self.trial_dir(trial_id) / "trajectory.json"

    def weights_dir(self, version: int) -> Path:
        return self.weights / f"v{version}"

    def attempt_dir(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:03d}"

    def last_attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        if not self.attempts.is_dir():
            return 0
        return max((int(d.name) for d in self.attempts.iterdir() if d.name.isdigit()), default=0)

    def new_attempt(self) -> int:
        """Make the folder of the next attempt and return its number (from 1)."""
        attempt = self.last_attempt() + 1
        (self.attempt_dir(attempt) / "services").mkdir(parents=True)
        return attempt


def _claim(folder: Path, run_id: str, run_path: Path) -> None:
    """Take a folder outside the run for it; another run's folder is refused."""
    mark = folder / _OWNER
    if mark.is_file():
        owner = read_json(mark)
        raise UserError(
            f"{folder} belongs to the run {owner['path']}",
            "Choose another --save-dir or --save-traces-dir.",
        )
    write_json(mark, {"id": run_id, "path": str(run_path)})


def _refuse_secrets(config: MilesConfig) -> None:
    urls = [config.agent_server.agent_server_url, config.cluster.ray_address]
    for url in [*urls, *config.engine.engine_urls]:
        if url and urlsplit(url).password:
            raise UserError(
                f"a URL in the configuration carries a password (host {urlsplit(url).hostname})",
                "Secrets come from the environment; take it out of the URL.",
            )


def find_run(name: str, runs_dir: str | Path = "runs") -> RunDir:
    """The run that a person means: a path, a name under `runs_dir`, or `latest`."""
    for candidate in (Path(name), Path(runs_dir) / name):
        run = RunDir(candidate.resolve())
        if run.exists():
            return run
    known = sorted(p.parent.name for p in Path(runs_dir).glob("*/run.json") if p.parent.is_dir())
    known = [k for k in known if k != "latest"]
    listing = (
        f"Runs in {runs_dir}/: {', '.join(known[-10:])}"
        if known
        else f"There is no run in {runs_dir}/ yet: give another --runs-dir or the run's path, "
        "or make one with `make quickstart`."
    )
    raise UserError(f"no run named {name!r}: neither a run directory nor in {runs_dir}/", listing)
