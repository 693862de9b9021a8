"""Sandboxes that are left behind: whose they are, when they are ended, what is never touched."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("harbor")
from agent_container_helpers import IMAGE, left, own_podman, podman, remove_all  # noqa: E402
from agent_server_helpers import Server, make_task  # noqa: E402

from miles_core.agent_server import environments  # noqa: E402
from miles_core.agent_server.reaper import kinds  # noqa: E402
from miles_core.agent_server.reaper.daytona import Daytona, labels  # noqa: E402
from miles_core.agent_server.reaper.engines import PROJECT, Engine  # noqa: E402
from miles_core.agent_server.reaper.kernel import Bubblewrap  # noqa: E402
from miles_core.agent_server.reaper.left import KindFailed, Left  # noqa: E402
from miles_core.agent_server.reaper.owner import FILE, Owner, open_owner, tag  # noqa: E402
from miles_core.agent_server.reaper.reaper import Reaper  # noqa: E402
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits  # noqa: E402
from miles_core.serving import process_start  # noqa: E402

pytestmark = pytest.mark.agent_env

OWNER = Owner("0123456789ab", ("podman", "docker"))
OTHER = Owner("ba9876543210")


def test_a_trials_directory_keeps_its_owner_and_a_copy_has_another(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    owner = open_owner(first, "podman")
    assert open_owner(first, "docker") == Owner(owner.id, ("podman", "docker"))
    assert open_owner(first, "podman").kinds == ("podman", "docker")
    shutil.copytree(first, tmp_path / "copy")
    assert open_owner(tmp_path / "copy", "podman").id != owner.id
    assert json.loads((first / FILE).read_text())["id"] == owner.id


@pytest.mark.parametrize(
    "trial", ["t-1", "A.b", "x_", "0", "a" * 200, "miles-0123456789ab-x", "deadbeef-deadbeef"]
)
def test_names_are_told_apart_and_read_back(trial: str) -> None:
    name = OWNER.name(trial, f"{trial}__env")
    images = (f"localhost/{name}_main:latest", f"{name}-deadbeef:latest")
    for text in (name, *images, f"/tmp/{name}-resources.json"):
        named = OWNER.named(text)
        assert named is not None and named.tag == tag(trial) and name.startswith(named.name)
    assert OTHER.named(name) is None
    others = {OWNER.name(trial, f"{trial}__verifier__a"), OWNER.name(trial.upper() + "1", "")}
    assert all(OWNER.named(other).name != OWNER.named(name).name for other in others)  # type: ignore[union-attr]
    assert name == name.lower() and "--" not in name and len(name) < 120


class Shelf:
    """A kind of sandbox that is a list."""

    name = "shelf"

    def __init__(self, *there: Left) -> None:
        self.there = list(there)
        self.broken = False

    async def find(self) -> list[Left]:
        if self.broken:
            raise ValueError("no answer")
        return list(self.there)

    async def remove(self, left: Left) -> None:
        if self.broken or left.id == "stuck":
            raise KindFailed("in use")
        self.there.remove(left)


def sandbox(trial: str, age_s: float = 1.0) -> Left:
    return Left("shelf", trial, trial, tag(trial), age_s)


def test_what_runs_is_left_alone_and_what_has_no_trial_is_ended_at_the_second_look() -> None:
    shelf = Shelf(sandbox("runs", 99.0), sandbox("lost"), sandbox("old", 101.0))
    live = ["runs"]
    reaper = Reaper([shelf], lambda: live, lifetime_s=100.0)
    assert [one.id for one in asyncio.run(reaper.look())] == ["old"]
    assert [one.id for one in asyncio.run(reaper.look())] == ["lost"]
    live.clear()
    assert asyncio.run(reaper.look()) == []
    assert [one.id for one in asyncio.run(reaper.close())] == ["runs"]
    assert shelf.there == []


def test_a_sandbox_that_cannot_be_ended_is_told_and_the_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf, broken = Shelf(sandbox("stuck"), sandbox("lost")), Shelf()
    broken.broken = True
    reaper = Reaper([broken, shelf], list, math.inf)
    assert [one.id for one in asyncio.run(reaper.sweep())] == ["lost"]
    assert "stuck could not be ended: in use" in caplog.text
    assert "shelf were not looked for: ValueError('no answer')" in caplog.text


def test_kinds_that_cannot_be_listed_are_told() -> None:
    listed, unlisted = kinds.kinds_of(
        Owner("x", ("bubblewrap", "docker", "daytona", "modal", "a:B"))
    )
    assert [kind.name for kind in listed] == ["docker", "bubblewrap", "daytona"]
    assert unlisted == ["modal", "a:B"]
    assert "by itself" in kinds.warning("modal") and "provider" in kinds.warning("a:B")


@pytest.mark.parametrize("kind", sorted(kinds.LIFETIMES))
def test_harbor_knows_the_lifetime_of_a_kind(kind: str) -> None:
    """Read from its source: most of these cannot be imported without a provider's package."""
    import harbor.environments

    given = kinds.arguments(environments.find(kind), "owner", "t", 99.5)
    (name,) = given
    assert given[name] == 100
    place = Path(harbor.environments.__path__[0])
    sources = [place / f"{kind}.py", *(place / kind).glob("*.py")]
    text = "".join(source.read_text() for source in sources if source.exists())
    assert f"        {name}: int" in text


# ---- bubblewrap --------------------------------------------------------------------


def test_cgroups_of_dead_servers_and_of_trials_that_have_ended(tmp_path: Path) -> None:
    """Directories stand in for cgroups, which only differ in the files that they are born with."""
    own = tmp_path / "memory" / f"miles-agent-{os.getpid()}-{process_start(os.getpid())}"
    dead = tmp_path / "pids" / "miles-agent-1-1"
    for name in ("runs-1", "lost-1", "lost-2", "images.abc"):
        (own / name).mkdir(parents=True)
    (dead / "somebody-1").mkdir(parents=True)
    (tmp_path / "cpu" / "miles-agents").mkdir(parents=True)
    reaper = Reaper([Bubblewrap([own], tmp_path)], lambda: ["runs"])
    ended = asyncio.run(reaper.sweep())
    assert {(one.id, one.trial) for one in ended} == {
        *[("miles-agent-1-1", "somebody"), ("lost-1", "lost"), ("lost-2", "lost")]
    }
    assert [path.name for path in sorted(own.iterdir())] == ["images.abc", "runs-1"]
    assert not dead.exists() and (tmp_path / "cpu" / "miles-agents").exists()
    assert reaper.problems == []


def test_the_processes_of_a_cgroup_without_a_trial_are_ended(tmp_path: Path) -> None:
    tree = CgroupTree()
    try:
        if not tree.directories:
            pytest.skip(f"no cgroups here: {tree.limits}")
        cgroups = tree.make("lost-1", Limits())
        left = subprocess.Popen(["sleep", "600"])
        for directory in cgroups:
            (directory / "cgroup.procs").write_text(str(left.pid))
        (found,) = asyncio.run(Bubblewrap(tree.directories).find())
        assert found.parts["processes"] == [str(left.pid)] and found.trial == "lost"
        threading.Timer(0.2, left.wait).start()  # a zombie keeps its cgroup busy
        asyncio.run(Bubblewrap(tree.directories).remove(found))
        assert left.wait() == -9 and not any(path.exists() for path in cgroups)
    finally:
        tree.close()


# ---- engines -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("podman")
    made = own_podman(root)
    yield made
    remove_all(made, root)


@pytest.fixture
def served(storage: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of a podman that speaks Docker's protocol."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    address = f"unix://{tmp_path}/socket"
    service = subprocess.Popen(
        ["podman", "system", "service", "--time", "0", address],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **storage},
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "socket").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        yield address
    finally:
        service.kill()
        service.wait()


def make_left(storage: dict[str, str], project: str) -> None:
    """What a server that was killed leaves of a sandbox."""
    label = ["--label", f"{PROJECT}={project}"]
    for command in (
        ["network", "create", *label, f"{project}_default"],
        ["volume", "create", *label, f"{project}_data"],
        ["run", "-d", *label, "--network", f"{project}_default", IMAGE, "sleep", "600"],
        ["create", *label, "--volume", f"{project}_data:/data", IMAGE, "true"],
        ["tag", IMAGE, f"{project}_main"],
    ):
        done = podman(storage, *command)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["podman", "docker"])
def test_an_engine_ends_what_is_ours_and_touches_nothing_else(
    storage: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    program: str,
) -> None:
    for name, value in storage.items():
        monkeypatch.setenv(name, value)
    if program == "docker":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("served"))
    ours, others = OWNER.name("T.1", "T.1__env"), OTHER.name("T.1", "T.1__env")
    make_left(storage, ours)
    make_left(storage, others)
    podman(storage, "run", "-d", "--name", "somebody", IMAGE, "sleep", "600")
    before = left(storage, OWNER.id, OTHER.id)
    client = tmp_path / "podman"
    client.write_text("#!/bin/sh\nread line\n")
    client.chmod(0o755)
    working = subprocess.Popen([client, "exec", f"{ours}_main_1"], stdin=subprocess.PIPE)
    try:
        engine = Engine(program, OWNER)
        (found,) = asyncio.run(engine.find())
        assert ours == f"{found.id}-t-1" and (found.trial, found.tag) == ("t-1", tag("T.1"))
        assert {part: len(ids) for part, ids in found.parts.items()} == {
            "containers": 2,
            "networks": 1,
            "volumes": 1,
            "images": 1,
            "processes": 1,
        }
        assert found.age_s is not None and 0 <= found.age_s < 120
        asyncio.run(engine.remove(found))
        assert asyncio.run(engine.find()) == [] and working.wait(5) != 0
        after = left(storage, OWNER.id, OTHER.id)
        assert "somebody" in after["containers"] and others in str(after["images"])
        assert ours not in str(after)
        gone = {part: len(before[part]) - len(after[part]) for part in before}
        assert gone == {"containers": 2, "networks": 1, "volumes": 1, "images": 1}
    finally:
        working.kill()
        working.wait()
        asyncio.run(remove(Engine("podman", OTHER)))
        podman(storage, "rm", "--force", "--time", "0", "somebody")


async def remove(engine: Engine) -> None:
    for found in await engine.find():
        await engine.remove(found)


def test_an_engine_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(KindFailed, match="podman is not on PATH"):
        asyncio.run(Engine("podman", OWNER).find())


# ---- Daytona -----------------------------------------------------------------------


class DaytonaApi(BaseHTTPRequestHandler):
    """The three requests of Daytona's API that matter here, over a dict of sandboxes."""

    there: dict[str, dict[str, Any]]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/sandbox":
            wanted = json.loads(parse_qs(url.query)["labels"][0]).items()
            some = [one for one in self.there.values() if wanted <= one["labels"].items()]
            self._answer({"items": some, "nextCursor": None, "total": len(some)})
        elif url.path.startswith("/sandbox/"):
            self._answer(self.there[url.path.rpartition("/")[2]])
        else:
            self.send_error(404)

    def do_DELETE(self) -> None:
        gone = self.there[urlsplit(self.path).path.rpartition("/")[2]]
        gone["state"] = "destroying"
        self._answer(gone)

    def _answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        return


def remote(name: str, owner: str, trial: str) -> dict[str, Any]:
    made = datetime.now(UTC) - timedelta(seconds=50)
    names = {"id": name, "name": name, "organizationId": "o", "user": "u", "target": "t"}
    size = {"kvm": False, "cpu": 1, "gpu": 0, "memory": 1, "disk": 1}
    state = {"state": "started", "env": {}, "public": False, "networkBlockAll": False}
    place = {"toolboxProxyUrl": "http://127.0.0.1:9/toolbox", "createdAt": made.isoformat()}
    return {**names, **size, **state, **place, "labels": labels(owner, trial)}


def test_sandboxes_of_daytona(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real SDK, where it is installed, against an API of three requests."""
    pytest.importorskip("daytona")
    DaytonaApi.there = {
        "a": remote("a", OWNER.id, "lost"),
        "b": remote("b", OWNER.id, "runs"),
        "c": remote("c", OTHER.id, "lost"),
    }
    api = ThreadingHTTPServer(("127.0.0.1", 0), DaytonaApi)
    threading.Thread(target=api.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    monkeypatch.setenv("DAYTONA_API_URL", f"http://127.0.0.1:{api.server_port}")
    try:
        reaper = Reaper([Daytona(OWNER)], lambda: ["runs"])
        (found,) = asyncio.run(reaper.find())
        assert (found.id, found.trial) == ("a", "lost")
        assert found.age_s is not None and 40 < found.age_s < 100
        assert [one.id for one in asyncio.run(reaper.sweep())] == ["a"] and reaper.problems == []
        assert {name: one["state"] for name, one in DaytonaApi.there.items()} == {
            "a": "destroying",
            "b": "started",
            "c": "started",
        }
    finally:
        api.shutdown()
        api.server_close()


def test_an_account_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KindFailed, match="SDK is not installed|Daytona"):
        asyncio.run(Daytona(OWNER).find())


# ---- the command -------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "miles_core.agent_server.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_sweep_of_a_directory_that_a_server_works_in(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "answer")
    nothing = command("--sweep", "dry-run", "--trials-dir", str(tmp_path / "trials"))
    assert nothing.returncode == 0 and "no server has made a sandbox" in nothing.stdout
    server = Server(tmp_path, tmp_path / "tasks")
    try:
        refused = command("--sweep", "now", "--trials-dir", str(server.trials))
        assert refused.returncode == 2 and "a server works in" in refused.stderr
        listed = command("--sweep", "dry-run", "--trials-dir", str(server.trials))
        assert listed.returncode == 0 and "nothing was" in listed.stdout
    finally:
        server.stop()
    swept = command("--sweep", "now", "--trials-dir", str(server.trials))
    assert swept.returncode == 0 and "ended" in swept.stdout


def test_a_sandbox_whose_tools_are_not_there_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_task(tmp_path / "tasks", "answer")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = command(
        *["--sandbox", "podman", "--port", "0", "--tasks-dir", str(tmp_path / "tasks")],
        *["--trials-dir", str(tmp_path / "trials")],
    )
    assert refused.returncode == 2 and "Podman is not installed" in refused.stderr
