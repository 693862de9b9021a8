"""The secrets of a run's services: in one file that only its owner can read."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from miles_core.runs.directory import RunDir

NAMES = ("HARBOR_ADMIN_SECRET", "MILES_SESSION_TOKEN")


def secrets_path(run: RunDir) -> Path:
    """`RUN/cluster/secrets.json`, mode 0600."""
    return run.path / "cluster" / "secrets.json"


def read_secrets(run: RunDir) -> dict[str, str]:
    """The secrets by the names of their environment variables."""
    content: dict[str, str] = json.loads(secrets_path(run).read_bytes())
    return content


def ensure_secrets(run: RunDir, own_agent_server: bool) -> dict[str, str]:
    """Make or update the file.

    Random values are made once for a run. The secret of an agent server that is not the run's own
    comes from `HARBOR_ADMIN_SECRET`; without it, it is empty.
    """
    path = secrets_path(run)
    path.parent.mkdir(exist_ok=True)
    known = read_secrets(run) if path.exists() else {}
    wanted = {name: known.get(name) or secrets.token_urlsafe(32) for name in NAMES}
    if not own_agent_server:
        wanted["HARBOR_ADMIN_SECRET"] = os.environ.get("HARBOR_ADMIN_SECRET", "")
    if wanted != known:
        tmp = path.with_suffix(f".{os.getpid()}.tmp")
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(wanted, file)
        os.replace(tmp, path)
    return wanted
