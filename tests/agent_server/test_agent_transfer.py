"""Archives of a sandbox that a process of ours would not have made."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from miles_core.agent_server.sandbox import transfer
from miles_core.agent_server.sandbox.errors import SandboxError


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> bytes:
    """The header of an archive's member, and its data when it claims at most 64 bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o6777
    data = (b"x" * size).ljust(512, b"\0") if 0 < size <= 64 else b""
    return info.tobuf(tarfile.GNU_FORMAT) + data


REFUSED = {
    "parent": member("../planted"),
    "parent inside": member("a/../../planted"),
    "large": member("big", size=1 << 40),
    "negative": member("big", size=-1024),
    "reward": member("reward.json", size=2 << 20),
    "many": member("f") * (transfer.FILES_LIMIT + 1),
    "deep": member("d/" * 100 + "f"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, kind: str) -> None:
    """Ours pack what comes out of a sandbox; a fault of theirs must not be one of the host's."""
    with pytest.raises((SandboxError, tarfile.TarError)):
        transfer.unpack(member("first") + REFUSED[kind] + bytes(1024), tmp_path / "in/target")
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "target"]


def test_an_archive_is_files_and_folders_below_one(tmp_path: Path) -> None:
    links = [
        member("link", tarfile.SYMTYPE, str(tmp_path)),
        member("link/planted"),
        member("hard", tarfile.LNKTYPE, "/etc/passwd"),
        member("pipe", tarfile.FIFOTYPE),
        member("disk", tarfile.BLKTYPE),
        member(f"{tmp_path}/absolute", size=5),
    ]
    with tarfile.open(fileobj=io.BytesIO(b"".join(links) + bytes(1024))) as whole:
        assert len(whole.getmembers()) == len(links)
    transfer.unpack(b"".join(links) + bytes(1024), tmp_path / "target")
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    absolute = tmp_path / "target" / str(tmp_path).lstrip("/") / "absolute"
    assert sorted(files) == sorted([tmp_path / "target/link/planted", absolute])
    assert [oct(path.stat().st_mode & 0o7777) for path in files] == ["0o755"] * 2
