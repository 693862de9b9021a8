"""Images that a builder makes: buildah or podman."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_image_helpers import SAY, kept, said  # noqa: E402
from agent_scripted_model import DONE, ScriptedModel, bash  # noqa: E402
from agent_server_helpers import Server, make_task  # noqa: E402

from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env


def test_a_builder_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "miles_core.agent_server.main",
        "--images",
        "podman",
        "--port",
        "0",
    ]
    programs = [Path(shutil.which(name) or "") for name in ("bwrap", "unshare", "mount", "sh")]
    for path in programs:
        (tmp_path / path.name).symlink_to(path)
    done = subprocess.run(
        [*command, "--tasks-dir", str(tmp_path), "--trials-dir", str(tmp_path / "trials")],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "--images podman" in done.stderr and "apt-get install podman" in done.stderr


FOREIGN = """FROM scratch
ADD root.tar /
ENV WHO=image
WORKDIR /app
RUN echo 42 > /app/base.txt && cat /proc/sys/kernel/random/uuid > /app/id
ENTRYPOINT ["sh", "-c", "echo started > /app/started; exec \\"$@\\"", "x"]
"""

APPLETS = (
    "sh cat ls mkdir chmod chown dirname basename tar sleep echo rm cp mv ln touch head tail id "
    "grep sed sort find mktemp stat true false env test kill ps"
)


def static_busybox() -> bool:
    path = shutil.which("busybox")
    if path is None:
        return False
    return subprocess.run(["ldd", path], capture_output=True).returncode != 0


def foreign_root(target: Path) -> None:
    """A root file system with busybox and no C library, as a tar."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    made = target.parent / "root"
    (made / "bin").mkdir(parents=True)
    (made / "etc").mkdir()
    shutil.copy(busybox, made / "bin/busybox")
    for name in APPLETS.split():
        (made / "bin" / name).symlink_to("busybox")
    (made / "bin/bash").write_text('#!/bin/sh\nexec /bin/sh "$@"\n')
    (made / "bin/bash").chmod(0o755)
    (made / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    with tarfile.open(target, "w") as archive:
        archive.add(made, ".")
    shutil.rmtree(made)


def own_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Give a builder a storage of the test's own, or skip the test without that program."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/store"\nrunroot = "{tmp_path}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["buildah", "podman"])
@pytest.mark.skipif(not static_busybox(), reason="no static busybox (Debian: busybox-static)")
def test_images_of_a_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A root without any C library: Harbor and mini-swe-agent work in it, and it is kept."""
    own_storage(tmp_path, monkeypatch, program)
    tasks = tmp_path / "tasks"
    task = make_task(
        tasks,
        "foreign",
        dockerfile=FOREIGN,
        test=SAY.format(
            "cat /app/id; cat /app/answer.txt; echo $WHO; cat /app/started; ls /lib /usr 2>&1"
        ),
    )
    foreign_root(task / "environment/root.tar")
    local = [program, "build", "--isolation", "chroot", "-t", "localhost/made:1"]
    subprocess.run([*local, str(task / "environment")], check=True, capture_output=True)
    make_task(tasks, "local", dockerfile="FROM localhost/made:1\n", test=SAY.format("ls /app"))
    make_task(tasks, "broken", dockerfile="FROM localhost/made:1\nRUN exit 3\n")
    make_task(tasks, "bare", dockerfile="FROM localhost/made:1\nRUN rm /bin/bash\n")
    make_task(
        tasks,
        "fallback",
        dockerfile="FROM debian\nRUN --mount=type=bind,source=.,target=/x exit 0\n",
    )
    server = Server(tmp_path, tasks, "--images", program)
    try:
        first = said(server, "foreign", "oracle")
        assert first.splitlines()[1:4] == ["42", "image", "started"] and "libc" not in first
        assert said(server, "foreign", "oracle") == first
        assert said(server, "local").split() == ["base.txt", "id", "started"]
        states = [json.loads((image / "image.json").read_text()) for image in kept(server)]
        assert [(one["whole"], one["state"]["env"]["WHO"]) for one in states] == [
            (True, "image")
        ] * 2
        model = ScriptedModel([bash("cat base.txt > answer.txt; echo $WHO"), bash(DONE)])
        try:
            result = server.run("foreign", "mini-swe-agent", base_url=model.url)
        finally:
            model.close()
        assert result.reward == 1.0 and result.agent_metrics.turns == 2, result.verdict
        broken, bare = server.run("broken", "nop").verdict, server.run("bare", "nop").verdict
        assert broken.cause is Cause.SANDBOX_FAILED and "RUN exit 3" in broken.detail
        assert bare.cause is Cause.SANDBOX_UNSUPPORTED and "no bash" in bare.detail
        assert f"{program} build failed" in server.run("fallback", "nop").verdict.detail
        listing = [program, *(["containers"] if program == "buildah" else ["ps", "-a"]), "-q"]
        left = subprocess.run(listing, capture_output=True, text=True)
        names = subprocess.run([program, "images"], capture_output=True, text=True).stdout
        assert left.stdout == "" and "miles-agent" not in names and "localhost/made" in names
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.skipif(not static_busybox(), reason="no static busybox (Debian: busybox-static)")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    own_storage(tmp_path, monkeypatch, "buildah")
    mark = f"sleep {random.randint(10**6, 10**8)}"
    text = f"FROM scratch\nADD root.tar /\nRUN {mark}\n"
    task = make_task(tmp_path / "tasks", "sleeps", dockerfile=text)
    foreign_root(task / "environment/root.tar")
    server = Server(tmp_path, tmp_path / "tasks", "--images", "buildah")
    request = TrialRequest(instance_id="sleeps", agent_name="nop")
    server.call(lambda client: client.start("sleeps-1", request))
    until(lambda: running(mark))
    server.stop(number)
    until(lambda: not running(mark))
    until(lambda: buildah("containers", "-q") == "")
    assert "miles-agent" not in buildah("images")


def buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def running(mark: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return any(line.endswith(mark) for line in listed.stdout.splitlines())


def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)
