"""Images of tasks: what a Dockerfile makes, and the cache of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
import tarfile
import uuid
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_image_helpers import ID, SAY, kept, said  # noqa: E402
from agent_server_helpers import TOML, Server, assert_no_verdict, make_task  # noqa: E402

from miles_core.agent_server.client import AgentServerClient  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest, TrialResult  # noqa: E402
from miles_core.agent_server.sandbox import layers  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env


def refused(server: Server, tasks: Path, dockerfile: str) -> TrialResult:
    name = f"refused-{uuid.uuid4().hex[:8]}"
    make_task(tasks, name, dockerfile=dockerfile)
    return server.run(name, "nop")


FULL = """ARG TAG=12-slim
FROM debian:${TAG} AS base
ARG TARGETARCH GREETING=hello
ENV WHO=world KEPT='$WHO'
WORKDIR /app
FROM base AS made
RUN mkdir -p out/deep && printf 'from a stage' > out/deep/file && ln -s deep/file out/link \\
    && chown 7:8 out/deep/file && mkfifo out/deep/pipe && ln out/deep/file out/hard
FROM base
ARG GREETING
COPY --from=made app/out/ /app/copied/
COPY --chown=33:44 --chmod=640 data.bin some\\ dir/*.txt /app/given/
COPY <<EOF <<'RAW' /app/texts/
$GREETING $WHO
EOF
$GREETING
RAW
ADD packed.tgz /app/unpacked
COPY . /app/all/
RUN <<EOT
set -e
rm /usr/bin/env
rm -rf /usr/share/perl5 /etc/skel
mkdir /etc/skel
touch /etc/skel/only
echo "$GREETING \\$WHO" > /app/run.txt
EOT
RUN <<EOT
#!/usr/bin/python3
open("/app/python.txt", "w").write("from python")
EOT
RUN sleep 987 & true
RUN useradd --create-home someone && setfattr -n user.note -v kept /app/run.txt || true
RUN cat /proc/sys/kernel/random/uuid > /app/id
ONBUILD RUN exit 1
USER someone
"""

LOOK = r"""
cat /app/id
cat /app/copied/deep/file; echo
readlink /app/copied/link
stat -c '%u:%g %A %h %F' /app/copied/deep/file /app/copied/deep/pipe
(cd /app/given; stat -c '%u:%g %a %n' *)
sha256sum < /app/all/data.bin
cat /app/texts/EOF /app/texts/RAW /app/run.txt /app/python.txt; echo
cat /app/unpacked/inner/packed.txt; echo
ls -b /app/all
ls -A /etc/skel
for gone in /usr/bin/env /usr/share/perl5; do [ -e $gone ] && echo "$gone is there"; done
pgrep -f 'sleep 98[7]' && echo "a process is there"
echo "$WHO $KEPT $(id -un) $PWD"
"""


def fill_context(directory: Path) -> bytes:
    """Files for `FULL`; the bytes of data.bin."""
    data = bytes(range(256)) * 40
    (directory / "data.bin").write_bytes(data)
    (directory / "some dir").mkdir()
    (directory / "some dir" / "a b.txt").write_text("x")
    (directory / "odd é\t'$name [*]").write_text("x")
    (directory / "ignored.log").write_text("x")
    (directory / ".dockerignore").write_text("*.log\npacked.tgz\nDockerfile\n!packed.tgz\n")
    with tarfile.open(directory / "packed.tgz", "w:gz") as archive:
        inner = directory / "some dir" / "packed.txt"
        inner.write_text("was packed")
        archive.add(inner, "inner/packed.txt")
        inner.unlink()
    return data


def test_a_dockerfile_is_followed_once_and_kept(server: Server, tasks: Path) -> None:
    task = make_task(tasks, "full", dockerfile=FULL, test=SAY.format(LOOK))
    data = fill_context(task / "environment")
    first = said(server, "full")
    lines = first.splitlines()
    assert lines[1:3] == ["from a stage", "deep/file"]
    assert lines[3] == "7:8 -rw-r--r-- 2 regular file" and lines[4].startswith("0:0 p")
    assert lines[5:7] == ["33:44 640 a b.txt", "33:44 640 data.bin"]
    assert lines[7].split()[0] == hashlib.sha256(data).hexdigest()
    assert lines[8:12] == ["hello world", "$GREETING", "hello $WHO", "from python"]
    assert lines[12] == "was packed"
    assert lines[13:17] == ["data.bin", "odd\\ é\\t'$name\\ [*]", "packed.tgz", "some\\ dir"]
    assert lines[17:] == ["only", "world $WHO someone /app"]
    assert said(server, "full") == first, "the second trial has another image"


def test_trials_at_once_build_once(server: Server, tasks: Path) -> None:
    text = f"FROM debian\nWORKDIR /app\nRUN sleep 0.5\n{ID}"
    make_task(tasks, "at-once", dockerfile=text, test=SAY.format("cat /app/id"))
    before = kept(server)

    async def both(client: AgentServerClient) -> list[TrialResult]:
        request = TrialRequest(instance_id="at-once", agent_name="nop")
        runs = [client.run(f"o-{uuid.uuid4().hex[:12]}", request, 120.0) for _ in range(3)]
        return list(await asyncio.gather(*runs))

    results = server.call(both)
    outputs = [
        path.read_text()
        for result in results
        for path in (server.trials / result.trial_id).rglob("test-stdout.txt")
    ]
    assert len(outputs) == 3 and len(set(outputs)) == 1
    assert len(kept(server) - before) == 1


def test_what_makes_no_files_is_not_kept(server: Server) -> None:
    before = kept(server)
    assert server.run("answer").reward == 1.0
    assert kept(server) == before


def test_links_of_an_image_lead_nowhere_on_the_host(
    server: Server, tasks: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    text = (
        f"FROM debian\nRUN mkdir /d && ln -s {secret} /d/f && ln -s {tmp_path} /d/g && ln -s / /r\n"
    )
    look = f"readlink /d/f /d/g /r; cat {secret}; ls /d/g/"
    make_task(tasks, "links", dockerfile=text, test=SAY.format(f"({look}) 2>&1"))
    before = kept(server)
    assert "of the host" not in said(server, "links")
    (image,) = kept(server) - before
    assert os.readlink(image / "root/d/f") == str(secret)
    assert stat.S_ISLNK((image / "root/r").lstat().st_mode)


@pytest.mark.parametrize(
    ("dockerfile", "cause", "words"),
    [
        ("", Cause.TASK_INVALID, "Dockerfile line 1: there is no FROM"),
        ("RUN true\n", Cause.TASK_INVALID, "Dockerfile line 1: RUN true"),
        ("FROM debian\nRUM true\n", Cause.TASK_INVALID, "line 2"),
        ("FROM debian\nCOPY nothing /x\n", Cause.TASK_INVALID, "line 2.*does not exist"),
        ("FROM debian\nCOPY ../x /x\n", Cause.TASK_INVALID, "line 2.*leaves the build context"),
        ("FROM debian\nRUN --mount=type=bind,target=/x ls\n", Cause.SANDBOX_UNSUPPORTED, "line 2"),
        ("FROM debian\nRUN exit 3\n", Cause.SANDBOX_UNSUPPORTED, "line 2.*failed with 3"),
        ("FROM alpine:3\n", Cause.SANDBOX_UNSUPPORTED, "line 1.*--images buildah.*apt-get install"),
    ],
)
def test_what_cannot_be_followed(
    server: Server, tasks: Path, dockerfile: str, cause: Cause, words: str
) -> None:
    before = kept(server)
    assert_no_verdict(refused(server, tasks, dockerfile), cause, words)
    assert kept(server) == before


def test_images_outlive_a_server_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for name in ("a", "b", "c"):
        text = f"FROM debian\nWORKDIR /app\nRUN head -c 400000 /dev/urandom > /app/{name}\n{ID}"
        make_task(tasks, name, dockerfile=text, test=SAY.format("cat /app/id"))
    server = Server(tmp_path, tasks, "--images-cache-gb", "0.001")
    try:
        a, b = said(server, "a"), said(server, "b")
        server.stop()
        (server.trials / ".images/.new-left").mkdir()
        server.start()
        assert not (server.trials / ".images/.new-left").exists()
        assert said(server, "a") == a
        c = said(server, "c")
        assert len(kept(server)) == 2
        assert (said(server, "a"), said(server, "c")) == (a, c)
        assert said(server, "b") != b
        (tasks / "c/environment/more.txt").write_text("another context")
        assert said(server, "c") != c
    finally:
        server.stop()


def test_an_image_of_a_task_without_a_dockerfile(server: Server, tasks: Path) -> None:
    verdicts = {}
    for name, image in (("known", "python:3.12"), ("unknown", "alpine:3")):
        task = make_task(tasks, name, toml=f'{TOML}docker_image = "{image}"\n')
        (task / "environment/Dockerfile").unlink()
        (task / "environment/answer.txt").write_text("42")
        verdicts[name] = server.run(name, "nop").verdict
    assert verdicts["known"].reward == 1.0, "the environment directory is not in the workdir"
    assert verdicts["unknown"].cause is Cause.SANDBOX_UNSUPPORTED
    assert "task.toml: docker_image" in verdicts["unknown"].detail


@pytest.mark.slow
def test_a_disk_that_holds_no_layers(tmp_path: Path) -> None:
    """On an overlay a Dockerfile is followed in each trial, with the same outcome."""
    places = {name: tmp_path / name for name in ("lowerdir", "upperdir", "workdir", "trials")}
    for place in places.values():
        place.mkdir()
    options = ",".join(f"{name}={places[name]}" for name in ("lowerdir", "upperdir", "workdir"))
    subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, places["trials"]], check=True
    )
    try:
        text = f"FROM debian AS a\nWORKDIR /app\n{ID}FROM a\nCOPY --from=a /app/id /app/other\n"
        text += "RUN rm /usr/bin/env && rm -rf /etc/skel\n"
        look = "cat /app/id; cmp /app/id /app/other; ls /usr/bin/env /etc/skel 2>&1"
        make_task(tmp_path / "tasks", "id", dockerfile=text, test=SAY.format(look))
        server = Server(tmp_path, tmp_path / "tasks")
        try:
            first, second = said(server, "id"), said(server, "id")
            assert first != second and first.count("No such file") == 2
            assert kept(server) == set()
        finally:
            server.stop()
    finally:
        subprocess.run(["umount", places["trials"]], check=True)


def test_a_layer_is_copied_as_it_is(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "opaque").mkdir(parents=True)
    os.setxattr(source / "opaque", layers.OPAQUE, b"y")
    os.setxattr(source / "opaque", "user.overlay.origin", b"host")
    os.mknod(source / "whiteout", stat.S_IFCHR, os.makedev(0, 0))
    with open(source / "holes", "wb") as file:
        file.seek(50 << 20)
        file.write(b"end")
    os.link(source / "holes", source / "opaque/again")
    os.symlink("/etc/shadow", source / "link")
    (source / "tool").write_text("x")
    os.chown(source / "tool", 12, 34)
    (source / "tool").chmod(0o4751)
    os.utime(source / "tool", ns=(1, 2_000_000_001))
    opened = os.open(source, os.O_RDONLY)
    try:
        layers.copy_layer(opened, target)
    finally:
        os.close(opened)
    assert os.listxattr(target / "opaque") == [layers.OPAQUE]
    assert (target / "whiteout").lstat().st_rdev == 0
    assert (target / "holes").stat().st_ino == (target / "opaque/again").stat().st_ino
    assert (target / "holes").stat().st_blocks < 1000
    assert (target / "holes").read_bytes() == (source / "holes").read_bytes()
    assert os.readlink(target / "link") == "/etc/shadow"
    tool = (target / "tool").stat()
    assert (tool.st_uid, tool.st_gid, tool.st_mode & 0o7777) == (12, 34, 0o4751)
    assert tool.st_mtime_ns == 2_000_000_001
