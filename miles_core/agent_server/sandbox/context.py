"""The build context of a task: its environment directory without what .dockerignore leaves out."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

_CHUNK = 1 << 20
_hashes: dict[tuple[str, int, int, int, int], bytes] = {}
"""SHA-256 of files by path, inode, size and times, so that a trial reads no file again."""
_HASHES_LIMIT = 100_000


class Context:
    """Files, directories and links by their paths from `root`; other kinds are left out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ignore = _Ignore(_ignore_lines(root))

    @cached_property
    def entries(self) -> dict[str, os.stat_result]:
        """What each path is, links not followed, in the order of the paths."""
        found = dict(self._walk(""))
        return {path: found[path] for path in sorted(found)}

    def _walk(self, below: str) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self.root / below) as listed:
            for entry in listed:
                path = f"{below}/{entry.name}" if below else entry.name
                status = entry.stat(follow_symlinks=False)
                is_directory = stat.S_ISDIR(status.st_mode)
                known = is_directory or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
                ignored = self._ignore.matches(path)
                if known and not ignored:
                    yield path, status
                if is_directory and not (ignored and self._ignore.final):
                    yield from self._walk(path)

    @property
    def dockerfile(self) -> bytes | None:
        """The Dockerfile, whether or not it is part of the context."""
        path = self.root / "Dockerfile"
        return path.read_bytes() if path.is_file() else None

    def digest(self) -> str:
        """SHA-256 of paths, modes, links and contents; times and owners do not count."""
        total = hashlib.sha256()
        for path, status in self.entries.items():
            name = os.fsencode(path)
            total.update(b"%d %d " % (status.st_mode, len(name)) + name)
            if stat.S_ISREG(status.st_mode):
                total.update(self._hash(path, status))
            elif stat.S_ISLNK(status.st_mode):
                total.update(os.fsencode(os.readlink(self.root / path)) + b"\0")
        return total.hexdigest()

    def _hash(self, path: str, status: os.stat_result) -> bytes:
        full = str(self.root / path)
        times = (status.st_mtime_ns, status.st_ctime_ns)
        key = (full, status.st_ino, status.st_size, *times)
        if key not in _hashes:
            if len(_hashes) >= _HASHES_LIMIT:
                _hashes.clear()
            with open(full, "rb") as file:
                _hashes[key] = hashlib.file_digest(file, "sha256").digest()
        return _hashes[key]

    def find(self, pattern: str) -> list[tuple[str, str]]:
        """What a source of COPY names: each path, links followed, with its name; "" is all.

        Raises ValueError for a source outside of the context.
        """
        parts: list[str] = []
        for part in pattern.split("/"):
            if part == "..":
                if not parts:
                    raise ValueError("the source leaves the build context")
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        if not parts:
            return [("", "")]
        named = ["/".join(parts)]
        if re.search(r"[*?\[\\]", named[0]):
            matching = re.compile(_regex(named[0]), re.DOTALL)
            named = [path for path in self.entries if matching.fullmatch(path)]
        found = [(self._followed(path), os.path.basename(path)) for path in named]
        return [(path, name) for path, name in found if path == "" or path in self.entries]

    def _followed(self, path: str) -> str:
        """A path with its links followed; raises ValueError when they leave the context."""
        root = os.path.realpath(self.root)
        real = os.path.realpath(os.path.join(root, path))
        if real == root:
            return ""
        if not real.startswith(root + "/"):
            raise ValueError("the source leads out of the build context")
        return real[len(root) + 1 :]

    def is_directory(self, path: str) -> bool:
        return path == "" or (path in self.entries and stat.S_ISDIR(self.entries[path].st_mode))

    def members(self, source: str, name: str) -> Iterator[tuple[tarfile.TarInfo, Path | None]]:
        """What a source is in an archive: itself as `name`, or what is in it below `name`."""
        if not self.is_directory(source):
            yield self._member(source, name)
            return
        prefix = f"{source}/" if source else ""
        for path in self.entries:
            if path.startswith(prefix):
                below = path[len(prefix) :]
                yield self._member(path, f"{name}/{below}" if name else below)

    def _member(self, path: str, name: str) -> tuple[tarfile.TarInfo, Path | None]:
        status, full = self.entries[path], self.root / path
        info = tarfile.TarInfo(name)
        info.mode = stat.S_IMODE(status.st_mode)
        info.mtime = int(status.st_mtime)
        if stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(full)
        else:
            info.size = status.st_size
            return info, full
        return info, None


def _ignore_lines(root: Path) -> list[str]:
    for name in ("Dockerfile.dockerignore", ".dockerignore"):
        if (root / name).is_file():
            text = (root / name).read_bytes().decode("utf-8", "surrogateescape")
            return text.removeprefix("\ufeff").splitlines()
    return []


class _Ignore:
    """The patterns of a .dockerignore; the last one that matches a path or a parent decides."""

    def __init__(self, lines: list[str]) -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for line in lines:
            text = line.strip()
            if not text or line.startswith("#"):
                continue
            kept = text.startswith("!")
            cleaned = "/".join(
                part for part in text.removeprefix("!").strip().split("/") if part not in ("", ".")
            )
            if cleaned:
                pattern = re.compile(_regex(cleaned) + r"(?:/.*)?", re.DOTALL)
                self._rules.append((pattern, not kept))

    @property
    def final(self) -> bool:
        """Whether nothing in an ignored directory can be part of the context."""
        return all(ignored for _, ignored in self._rules)

    def matches(self, path: str) -> bool:
        result = False
        for pattern, ignored in self._rules:
            if ignored != result and pattern.fullmatch(path):
                result = ignored
        return result


def _regex(pattern: str) -> str:
    """A pattern of path.Match of Go, with ** for any number of directories."""
    made, at = "", 0
    while at < len(pattern):
        mark = pattern[at]
        at += 1
        if mark == "*" and pattern[at : at + 1] == "*":
            at += 1
            if pattern[at : at + 1] == "/":
                made, at = made + "(?:.*/)?", at + 1
            else:
                made += ".*"
        elif mark == "*":
            made += "[^/]*"
        elif mark == "?":
            made += "[^/]"
        elif mark == "\\" and at < len(pattern):
            made, at = made + re.escape(pattern[at]), at + 1
        elif mark == "[" and (end := pattern.find("]", at + 1)) > 0:
            inner = pattern[at:end].replace("\\", "\\\\").replace("[", "\\[")
            negated = inner[:1] in ("^", "!")
            made += f"[{'^/' if negated else ''}{inner[1:] if negated else inner}]"
            at = end + 1
        else:
            made += re.escape(mark)
    return made
