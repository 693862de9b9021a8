"""Which environment of Harbor a `--sandbox` means: ours, one that Harbor has, or a class."""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import UserError

BUBBLEWRAP = "bubblewrap"
CONTAINERS = {"docker": "Docker", "podman": "Podman"}
"""Kinds whose environment is a class of ours over Harbor's."""
SCRATCH = ".scratch"
CONTAINER_CLASSES = "miles_core.agent_server.containers"
COMPOSE = {
    "docker": "Install Docker's compose plugin.",
    "podman": "Install podman-compose 1.0.6 or newer (pip install podman-compose) on the PATH.",
}
OURS = "miles_core.agent_server.sandbox.environment:BubblewrapEnvironment"


@dataclass(frozen=True)
class Sandbox:
    """A kind of sandbox; `ours` for the bubblewrap environment and classes derived from it."""

    name: str
    ours: bool
    import_path: str | None = None

    @classmethod
    def bubblewrap(cls) -> Sandbox:
        return cls(BUBBLEWRAP, True, OURS)

    @property
    def kind(self) -> str:
        """What its sandboxes are, for those who look for them."""
        return BUBBLEWRAP if self.ours else self.name

    def config(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The fields of Harbor's EnvironmentConfig for one trial."""
        place = (
            {"type": self.name} if self.import_path is None else {"import_path": self.import_path}
        )
        return {**place, "kwargs": arguments}


def find(name: str) -> Sandbox:
    """The sandbox of a name or of `package.module:Class`; raises UserError."""
    if name == BUBBLEWRAP:
        return Sandbox.bubblewrap()
    if ":" in name:
        return _by_class(name)
    from harbor.models.environment_type import EnvironmentType

    known = [BUBBLEWRAP, *[kind.value for kind in EnvironmentType]]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--sandbox {name}: not one of {', '.join(known)}{hint}")
    if name in CONTAINERS:
        return Sandbox(name, False, f"{CONTAINER_CLASSES}:{CONTAINERS[name]}")
    return Sandbox(name, False)


def _by_class(name: str) -> Sandbox:
    from harbor.environments.base import BaseEnvironment

    from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment

    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--sandbox {name}: cannot be imported ({error})") from error
    if not (isinstance(made, type) and issubclass(made, BaseEnvironment)):
        raise UserError(f"--sandbox {name}: is not a subclass of Harbor's BaseEnvironment")
    return Sandbox(name, issubclass(made, BubblewrapEnvironment), name)


def check_host(sandbox: Sandbox) -> None:
    """Whether this host can make sandboxes of a kind, as far as it can tell; raises UserError."""
    if sandbox.ours:
        _check_bubblewrap()
    elif sandbox.name in CONTAINERS:
        _check_engine(sandbox.name)


def _check_engine(name: str) -> None:
    from miles_core.agent_server import containers

    made: type[containers.ContainerEnvironment] = getattr(containers, CONTAINERS[name])
    beside = os.path.dirname(sys.executable)
    if name == "podman" and os.path.exists(f"{beside}/podman-compose"):  # newer than the system's
        os.environ["PATH"] = f"{beside}:{os.environ['PATH']}"
    try:
        made.preflight()
    except SystemExit as error:  # this is how Harbor says what is missing
        raise UserError(f"--sandbox {name}: {error}") from error
    command = made.runtime().compose_cmd("version")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise UserError(f"--sandbox {name}: {' '.join(command)} fails: {said}", COMPOSE[name])


def _check_bubblewrap() -> None:
    from miles_core.agent_server.sandbox.system import missing_tools, probe_user_namespace

    missing = missing_tools()
    if missing:
        raise UserError(
            f"the bubblewrap sandbox needs {', '.join(missing)}: install them "
            "(Debian: apt-get install bubblewrap util-linux), or use --sandbox docker"
        )
    if os.geteuid() != 0:
        raise UserError("the bubblewrap sandbox needs root here; or use --sandbox docker")
    problem = probe_user_namespace()
    if problem:
        raise UserError(
            f"the bubblewrap sandbox needs user namespaces ({problem}); "
            "allow them (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces), "
            "or use --sandbox docker"
        )


def own_scratch(trials_dir: Path) -> None:
    """Let what Harbor writes for a sandbox of another kind lie in the trials directory.

    It removes it when the sandbox ends; what a server that was killed has left is removed here.
    """
    scratch = trials_dir / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    tempfile.tempdir = str(scratch)
