"""A podman of the tests' own, and an image for it that is made of this host's programs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

IMAGE = "localhost/miles-tests:1"
DOCKERFILE = f"FROM {IMAGE}\nWORKDIR /app\n"
PROGRAMS = ("bash", "tmux", "script")
TREES = ("/lib/terminfo", "/usr/lib/locale/C.utf8")


def own_podman(root: Path) -> dict[str, str]:
    """The environment variables of a podman with its own storage under `root`, with the image.

    Skips the test, and says why, where podman can run no container.
    """
    for program in ("podman", "busybox", *PROGRAMS):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    root.mkdir(parents=True, exist_ok=True)
    (root / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{root}/store"\nrunroot = "{root}/run"\n'
    )
    (root / "containers.conf").write_text(_settings())
    variables = {
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
    }
    context = root / "image"
    _make_root(context / "root.tar")
    (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\nENV LANG=C.UTF-8\n")
    for command in (
        ["build", "--isolation", "chroot", "--tag", IMAGE, str(context)],
        ["run", "--rm", IMAGE, "bash", "-c", "exit 0"],
    ):
        done = podman(variables, *command)
        if done.returncode != 0:
            remove_all(variables, root)
            pytest.skip(f"podman {command[0]} fails here: {done.stderr.strip()[-300:]}")
    return variables


def podman(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        ["podman", *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def left(variables: dict[str, str], *owners: str) -> dict[str, list[str]]:
    """Everything in the storage but the image of the tests and what is kept of builds.

    Networks are in no storage: those whose name has the id of one of `owners`.
    """
    names = {
        "containers": ("ps", "--all", "--format", "{{.Names}}"),
        "networks": ("network", "ls", "--format", "{{.Name}}"),
        "volumes": ("volume", "ls", "--format", "{{.Name}}"),
        "images": ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}"),
    }
    listed = {what: podman(variables, *words).stdout.split() for what, words in names.items()}
    listed["networks"] = [
        name for name in listed["networks"] if any(owner in name for owner in owners)
    ]
    kept = (IMAGE, "localhost/miles-cache:")
    listed["images"] = [name for name in listed["images"] if not name.startswith(kept)]
    return {what: found for what, found in listed.items() if found}


def owner_of(trials: Path) -> str:
    """The id that is in the names of all sandboxes of a trials directory."""
    return str(json.loads((trials / ".sandboxes.json").read_text())["id"])


def remove_all(variables: dict[str, str], root: Path) -> None:
    """End what a failed test left, so that the storage can be removed."""
    podman(variables, "rm", "--all", "--force", "--time", "0")
    podman(variables, "image", "rm", "--all", "--force")
    subprocess.run(["umount", str(root / "store/overlay")], capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


def _settings() -> str:
    """Settings with which containers start in a container too, where limits cannot be raised."""
    limits = [
        f"{name}={min(4096, most)}:{min(4096, most)}"
        for name, most in (
            ("nofile", resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            ("nproc", resource.getrlimit(resource.RLIMIT_NPROC)[1]),
        )
        if most != resource.RLIM_INFINITY
    ]
    runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
    return (
        f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n"
    )


def _make_root(target: Path) -> None:
    """A root file system with busybox, bash and tmux, as a tar."""
    made = target.parent / "root"
    for name in ("bin", "tmp", "root", "etc", "usr/bin", "app"):
        (made / name).mkdir(parents=True, exist_ok=True)
    (made / "tmp").chmod(0o1777)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, made / "bin/busybox")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for name in applets.stdout.split():
        if name != "busybox":
            (made / "bin" / name).symlink_to("busybox")
    (made / "usr/bin/env").symlink_to("../../bin/busybox")
    files: list[str] = []
    for tree in filter(os.path.isdir, TREES):
        shutil.copytree(tree, made / tree.lstrip("/"), symlinks=True)
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        (made / "bin" / name).unlink(missing_ok=True)
        shutil.copy(program, made / "bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        files += [word for word in listed.split() if word.startswith("/")]
    for file in filter(os.path.exists, files):
        place = made / file.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    (made / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (made / "etc/group").write_text("root:x:0:\n")
    with tarfile.open(target, "w") as archive:
        archive.add(made, ".")
    shutil.rmtree(made)
