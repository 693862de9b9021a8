"""The read-only base of every sandbox: the host's programs and the harmless part of its /etc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from miles_core.agent_server.sandbox import packages
from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.lookups import RESOLV_CONF

TOOLS = ("bwrap", "unshare", "mount")

_ETC_COPIED = (
    "adduser.conf alternatives bash.bashrc ca-certificates.conf debconf.conf debian_version "
    "default/useradd deluser.conf ethertypes gai.conf host.conf inputrc ld.so.cache ld.so.conf "
    "ld.so.conf.d "
    "locale.alias localtime login.defs lsb-release magic mime.types nsswitch.conf os-release perl "
    "profile profile.d protocols python3 python3.11 python3.12 python3.13 rpc security services "
    "shells skel ssl/certs ssl/openssl.cnf terminfo timezone vim"
)

_DIRECTORIES = (
    "dev proc root home opt srv mnt media run tmp usr var/lib/dpkg "
    "var/lib/apt/lists/partial var/cache/apt/archives/partial var/log var/tmp "
    "logs/agent logs/verifier logs/artifacts"
)

_OPEN_DIRECTORIES = ("tmp", "var/tmp", "logs/agent", "logs/verifier", "logs/artifacts")


def missing_tools() -> list[str]:
    """The programs that the sandbox needs and that are not on the PATH."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def make_base(target: Path) -> Path:
    """Build the lower layer of the sandboxes' root in `target`, anew; returns it.

    It holds links into /usr, empty directories, and copies of /etc without accounts, keys or
    settings of this host.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _DIRECTORIES.split():
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in _OPEN_DIRECTORIES:
        (target / name).chmod(0o1777 if "tmp" in name else 0o777)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        source = Path("/") / name
        if source.is_symlink():
            (target / name).symlink_to(os.readlink(source).lstrip("/"))
        elif source.is_dir():
            raise SandboxError(f"/{name} is not a link into /usr: a merged /usr is needed")
    if packages.STATUS.is_file():
        shutil.copyfile(packages.STATUS, target / "var/lib/dpkg/status")
    (target / "var/run").symlink_to("/run")
    _make_etc(target / "etc")
    return target


def _make_etc(etc: Path) -> None:
    etc.mkdir()
    for name in _ETC_COPIED.split():
        source, copy = Path("/etc") / name, etc / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=name != "ssl/certs", ignore=_unreadable)
        elif source.is_file():
            shutil.copy2(source, copy)
    (etc / "passwd").write_text("".join(_accounts("passwd", id_field=2)))
    (etc / "group").write_text("".join(_accounts("group", id_field=2)))
    names = [line.split(":")[0] for line in (etc / "passwd").read_text().splitlines()]
    (etc / "shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in names))
    (etc / "shadow").chmod(0o640)
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n")
    (etc / "hostname").write_text("sandbox\n")
    (etc / "apt").mkdir()
    (etc / "apt" / "sources.list").write_text("deb http://deb.debian.org/debian stable main\n")
    (etc / packages.OFFLINE_CONFIG.removeprefix("/etc/")).write_text(packages.OFFLINE_TEXT)
    (etc / "resolv.conf").write_text(RESOLV_CONF)


def _unreadable(directory: str, names: list[str]) -> set[str]:
    """Names that cannot be copied: dangling links and files without permission."""
    paths = {name: os.path.join(directory, name) for name in names}
    return {name for name, path in paths.items() if not os.access(path, os.R_OK)}


def _accounts(file: str, id_field: int) -> list[str]:
    """The system's own accounts of a file of /etc, without those of people."""
    lines = []
    for line in (Path("/etc") / file).read_text().splitlines(keepends=True):
        fields = line.strip().split(":")
        if len(fields) > id_field and fields[id_field].isdigit():
            number = int(fields[id_field])
            if number < 1000 or number == 65534:
                lines.append(line if line.endswith("\n") else line + "\n")
    return lines


AGENT_PACKAGES = "/opt/miles/site-packages"
AGENT_CODE = "/opt/miles/inside"


def agent_binds() -> list[tuple[str, str]]:
    """Host directories that the agent in the sandbox reads: its Python, packages, entry script."""
    binds = [
        (sysconfig.get_path("purelib"), AGENT_PACKAGES),
        (str(Path(__file__).resolve().parent.parent / "inside"), AGENT_CODE),
    ]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr"):
        binds.insert(0, (prefix, prefix))
    return binds


def agent_python() -> str:
    """Path of the agent's Python, the same outside and inside."""
    return os.path.realpath(sys.executable)


def probe_user_namespace() -> str | None:
    """Why user namespaces cannot be used here, or None when they can."""
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    return None if result.returncode == 0 else result.stderr.strip()[:300]
