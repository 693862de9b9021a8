"""MANIFEST.json: size and digest of every file of a directory, and its durable publication."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_core import digest
from miles_core.checkpoints.layout import MANIFEST_FILE, STATE_FILE

THREADS = 4  # that read and digest files

# name of a file -> its size and digest
Digests = dict[str, tuple[int, str]]


def sync(path: Path) -> None:
    """Make a file's content, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace a file: readers and crashes see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def digests(paths: list[Path], algorithm: str = digest.ALGORITHM) -> list[str]:
    """Digests of several files, several at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda path: digest.of_file(path, algorithm), paths))


def _files(directory: Path) -> dict[str, Path]:
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST_FILE
    }


def seal(directory: Path, known: Digests | None = None, **about: Any) -> None:
    """Sync everything below `directory` and write its manifest, with `about` beside the files.

    `known` has size and digest of files that were digested while they were written.
    """
    files = _files(directory)
    for path in files.values():
        sync(path)
    unknown = [name for name in files if name not in (known or {})]
    found = digests([files[name] for name in unknown])
    sizes = {
        name: (files[name].stat().st_size, value)
        for name, value in zip(unknown, found, strict=True)
    }
    both = {**(known or {}), **sizes}
    entries = {name: {"size": both[name][0], digest.ALGORITHM: both[name][1]} for name in files}
    for folder in (p for p in directory.rglob("*") if p.is_dir()):
        sync(folder)
    write_durably(directory / MANIFEST_FILE, json.dumps({**about, "files": entries}, indent=1))


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and "size" in value and _algorithm(value) is not None


def _algorithm(entry: dict[str, Any]) -> str | None:
    """The digest of an entry stands under its algorithm's name."""
    return next((name for name in digest.KNOWN if name in entry), None)


def read(directory: Path) -> dict[str, Any] | None:
    """The manifest, or None when there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_text())
    except (OSError, ValueError):
        return None
    files = manifest.get("files") if isinstance(manifest, dict) else None
    valid = isinstance(files, dict) and all(_is_entry(entry) for entry in files.values())
    return manifest if valid else None


def verify(directory: Path) -> str | None:
    """What is wrong with a sealed directory, or None when every file is as it was sealed."""
    manifest = read(directory)
    if manifest is None:
        return f"{MANIFEST_FILE} is missing or unreadable"
    present, files = _files(directory), manifest["files"]
    with ThreadPoolExecutor(THREADS) as pool:
        faults = pool.map(_fault, (present.get(name) for name in files), files.values())
        for name, fault in zip(files, faults, strict=True):
            if fault is not None:
                pool.shutdown(cancel_futures=True)
                return f"{name} {fault}"
    return None


def verify_if_sealed(directory: Path) -> str | None:
    """As `verify` for a directory that is or was sealed: one with a manifest, readable or not, or
    with the state of a published checkpoint. None for what nobody has sealed yet."""
    sealed = any((directory / name).exists() for name in (MANIFEST_FILE, STATE_FILE))
    return verify(directory) if sealed else None


def _fault(path: Path | None, entry: dict[str, Any]) -> str | None:
    """What is wrong with a file, to follow its name."""
    if path is None:
        return "is missing"
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"has {size} bytes, not {entry['size']}"
        algorithm = _algorithm(entry)
        assert algorithm is not None
        same = digest.of_file(path, algorithm) == entry[algorithm]
        return None if same else "was changed"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory to fill, which gets the name `out` durably when the block ends without an error.

    Raises FileExistsError when `out` exists and is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists and is not empty")
    temporary = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        os.replace(temporary, out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a sealed directory to its name; one that is there already is replaced."""
    old = None
    if target.exists():
        old = target.with_name(f".old-{target.name}-{uuid.uuid4().hex[:8]}")
        os.replace(target, old)
    os.replace(temporary, target)
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)
