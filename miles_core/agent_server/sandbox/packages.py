"""Debian packages that a Dockerfile installs where the host's own system has them already."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

STATUS = Path("/var/lib/dpkg/status")
OFFLINE_CONFIG = "/etc/apt/offline.conf"
OFFLINE_TEXT = 'Dir::Etc::SourceList "/dev/null";\nDir::Etc::SourceParts "/dev/null";\n'
"""Settings of apt with no place to fetch from: what is installed is up to date."""

_BREAKS = re.compile(r"&&|\|\||[;|&\n()]")
_UNCLEAR = re.compile(r"[$`<>{}*?\[\]]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WITH_VALUE = ("-o", "--option", "-t", "--target-release", "-c", "--config-file", "-a")
_HARMLESS = frozenset({"update", "upgrade", "clean", "autoclean", "autoremove", "check"})


def asked(script: str) -> list[str] | None:
    """The packages that the apt commands of a shell script install, as they are written.

    None where there is no apt command, or one of which it cannot be said before it runs.
    """
    found: list[str] = []
    some = False
    for command in _BREAKS.split(script.replace("\\\n", " ")):
        if not re.search(r"\bapt(-get)?\s", command):
            continue
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            return None
        while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("sudo", "-E", "env")):
            words.pop(0)
        if not words or words[0] not in ("apt", "apt-get"):
            continue
        operands = _operands(words[1:])
        verb, packages = (operands[0], operands[1:]) if operands else ("", [])
        if verb not in _HARMLESS | {"install"} or _UNCLEAR.search(command):
            return None
        some = True
        found += packages if verb == "install" else []
    return found if some else None


def _operands(words: list[str]) -> list[str]:
    kept, values = [], False
    for word in words:
        if values:
            values = False
        elif word in _WITH_VALUE:
            values = True
        elif not word.startswith("-"):
            kept.append(word)
    return kept


def missing(packages: list[str]) -> list[str]:
    """Those of the packages that the host does not have, or not in the version asked for."""
    here = installed()
    lacking = []
    for package in packages:
        name, _, version = package.partition("=")
        if name not in here or (version and version != here[name]):
            lacking.append(package)
    return lacking


@functools.cache
def installed(status: Path = STATUS) -> dict[str, str]:
    """The installed packages of the host with their versions; none where dpkg does not rule."""
    if not status.is_file():
        return {}
    found = {}
    for block in status.read_text(errors="replace").split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines() if line[:1] != " ")
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields.get("Version", "")
    return found
