"""What of a task.toml means nothing to Harbor is told, with the nearest name that does."""

from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_server_helpers import TOML, Server, make_task  # noqa: E402

from miles_core.agent_server.protocol import PROBE  # noqa: E402
from miles_core.agent_server.task_keys import ignored_keys  # noqa: E402

pytestmark = pytest.mark.agent_env

ODD = """version = "1.0"
[metadata]
anything = 1
[environment]
memory = 2048
storage = "1G"
[environment.env]
ANY_NAME = "x"
[environment.healthcheck]
command = "true"
retrys = 3
[[steps]]
name = "a"
[steps.agent]
timeout = 3
[verifer]
timeout_sec = 3
[[artifacts]]
source = "/a"
dest = "b"
"""


def test_ignored_keys_of_every_table_are_named(tmp_path: Path) -> None:
    path = tmp_path / "task.toml"
    path.write_text(ODD)
    told = " ".join(ignored_keys(path))
    for words in (
        "environment.memory = 2048 is ignored: write it as text",
        "healthcheck.retrys means nothing to Harbor and is ignored; did you mean retries?",
        "steps.agent.timeout means nothing to Harbor and is ignored; did you mean timeout_sec?",
        "verifer means nothing to Harbor and is ignored; did you mean verifier?",
        "artifacts.dest means nothing",
    ):
        assert words in told, told
    for fine in ("version", "metadata", "anything", "storage", "ANY_NAME", "source"):
        assert f" {fine} " not in told and f".{fine} " not in told
    path.write_text(TOML.format(agent_s=1, verifier_s=1))
    assert ignored_keys(path) == []


def test_the_probe_notes_them_also_in_a_task_with_skills(server: Server, tasks: Path) -> None:
    toml = TOML + 'skills_dir = "/skills"\nmemmory = "2G"\n'
    make_task(tasks, "misspelt", toml=toml)
    found = server.run("misspelt", PROBE).agent_metrics.probe
    assert found is not None
    (note,) = [note for note in found["notes"] if "memmory" in note]
    assert note.endswith("did you mean memory?")
