"""The temporary Prefect server of `miles train`: a real one, on a database of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = """
import sys
from pathlib import Path
from flows.server import prefect_server
with prefect_server(Path(sys.argv[1])):
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        assert client.hello().status_code == 200
    print("served")
"""


def start(home: Path) -> "subprocess.Popen[str]":
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-c", START, str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**env, "HOME": str(home.parent)},
    )


def served(child: "subprocess.Popen[str]") -> None:
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 0 and "served" in output, output


def test_a_database_that_was_left_half_made_is_made_anew(tmp_path: Path) -> None:
    home = tmp_path / "prefect"
    home.mkdir()
    (home / "prefect.db").write_bytes(b"neither tables nor rows" * 1000)
    served(start(home))


@pytest.mark.slow
def test_the_first_servers_of_one_database_may_start_at_once(tmp_path: Path) -> None:
    children = [start(tmp_path / "prefect") for _ in range(3)]
    for child in children:
        served(child)
