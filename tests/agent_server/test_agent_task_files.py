"""Tasks whose files cannot be read, or that do not say what their sandbox is made of."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_server_helpers import (  # noqa: E402
    TOML,
    Server,
    assert_no_verdict,
    make_task,
)

from miles_core.agent_server import task_files  # noqa: E402
from miles_core.agent_server.tasks import TaskProblem, TaskSet, network_need  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

FILES = ("task.toml", "instruction.md", "environment/Dockerfile", "environment/.dockerignore")
FILES += ("environment/docker-compose.yaml", "tests/test.sh", "solution/solve.sh")
FILES += ("tests/.harborignore", "tests/deep/.harborignore")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def log_of_the_kernel(path: Path) -> None:
    path.symlink_to("/proc/kmsg")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, task_files.READ_LIMIT + 1)


def folder(path: Path) -> None:
    path.mkdir()


KINDS: list[Callable[[Path], None]] = [pipe, endless, log_of_the_kernel, huge, folder]


def problem(root: Path, name: str) -> str:
    """Why a task of a folder is invalid; a task that is read for ever fails the test."""
    found: list[TaskProblem | None] = []

    def load() -> None:
        try:
            TaskSet(root).load(name)
            found.append(None)
        except TaskProblem as error:
            found.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the task is being read for ever"
    error = found[0]
    if error is None:
        return ""
    assert error.cause is Cause.TASK_INVALID
    return str(error)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_no_end_is_named(tmp_path: Path, name: str) -> None:
    for kind in KINDS:
        task = make_task(tmp_path, kind.__name__, files={"tests/deep/data": ""})
        (task / name).unlink(missing_ok=True)
        kind(task / name)
        told = problem(tmp_path, kind.__name__)
        assert f": {name} " in told, (kind.__name__, told)


def test_files_of_steps_are_looked_at_too(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", toml=TOML + "[[steps]]\nname = 'one'\n")
    shutil.copytree(task / "tests", task / "steps/one/tests")
    pipe(task / "steps/one/instruction.md")
    assert "steps/one/instruction.md is a pipe" in problem(tmp_path, "t")


LINKS: dict[str, str] = {
    "environment/rootlink": "/",
    "environment/up": "..",
    "tests/self": ".",
    "environment/host": "/usr/lib",
    "other": "/proc/self",
    "environment/kernel": "/proc/version",
    "solution/sys": "/sys/kernel",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_away_is_named(tmp_path: Path, name: str) -> None:
    task = make_task(tmp_path, "t")
    (task / name).symlink_to(LINKS[name])
    assert f": {name} " in problem(tmp_path, "t")


def test_links_in_a_circle_and_links_that_multiply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(tmp_path, "circle", files={"data/a/file": "", "data/b/file": ""})
    (task / "data/a/to-b").symlink_to("../b")
    (task / "data/b/to-a").symlink_to("../a")
    assert "a link to a folder that it is in" in problem(tmp_path, "circle")
    task = make_task(tmp_path, "many", files={"data/0/file": ""})
    for number in range(1, 40):  # 2 ** 39 files for who follows each
        (task / f"data/{number}").mkdir()
        for name in "xy":
            (task / f"data/{number}/{name}").symlink_to(f"../{number - 1}")
    assert "more than" in problem(tmp_path, "many")


def test_what_is_not_read_may_be_of_any_kind(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", files={"data/file": "", "environment/data": ""})
    for name in ("pipe", "environment/pipe", "tests/pipe", "tests/other.sh"):
        pipe(task / name)
    (task / "environment/nowhere").symlink_to("/nowhere/at/all")
    (task / "environment/file").symlink_to("/etc/hostname")
    (task / "tests/inside").symlink_to("../data")
    assert problem(tmp_path, "t") == ""
    assert network_need(task, [task / "tests"]) is None


def no_dockerfile(task: Path) -> None:
    (task / "environment/Dockerfile").unlink()


def no_environment(task: Path) -> None:
    shutil.rmtree(task / "environment")


@pytest.mark.parametrize("remove", [no_dockerfile, no_environment])
def test_a_task_says_what_its_sandbox_is(
    tmp_path: Path, remove: Callable[[Path], None], server: Server, tasks: Path
) -> None:
    remove(make_task(tmp_path, "none"))
    told = problem(tmp_path, "none")
    assert "environment/" in told and "Dockerfile" in told and "docker_image" in told
    remove(make_task(tmp_path, "image", toml=TOML + 'docker_image = "debian:12"\n'))
    assert problem(tmp_path, "image") == ""
    remove(make_task(tasks, remove.__name__))
    for agent in ("oracle", "nop"):
        result = server.run(remove.__name__, agent)
        assert_no_verdict(result, Cause.TASK_INVALID, "Dockerfile .* no docker_image")
    remove(make_task(tasks, f"{remove.__name__}-image", toml=TOML + 'docker_image = "debian"\n'))
    assert server.run(f"{remove.__name__}-image", "oracle").verdict.cause is not Cause.TASK_INVALID


def test_a_compose_file_is_enough(tmp_path: Path) -> None:
    task = make_task(tmp_path, "t", files={"environment/docker-compose.yaml": "services: {}\n"})
    no_dockerfile(task)
    assert problem(tmp_path, "t") == ""


def test_a_server_with_such_tasks_goes_on_and_ends(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    make_task(tasks, "answer")
    for kind in (pipe, endless):
        for name in ("instruction.md", "tests/test.sh", "environment/Dockerfile"):
            task = make_task(tasks, f"{kind.__name__}-{Path(name).stem}")
            (task / name).unlink()
            kind(task / name)
    (make_task(tasks, "root") / "environment/rootlink").symlink_to("/")
    server = Server(tmp_path, tasks, "--max-concurrent", "2")
    try:
        for name in sorted(path.name for path in tasks.iterdir()):
            result = server.run(name, "oracle")
            if name == "answer":
                assert result.reward == 1.0
            else:
                assert_no_verdict(
                    result, Cause.TASK_INVALID, "no regular file|link to the folder /"
                )
    finally:
        assert server.stop(signal.SIGTERM) == 0
