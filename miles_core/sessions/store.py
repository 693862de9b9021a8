"""All sessions of one server: in memory while they are used, on disk from their first turn on."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import UserError
from miles_core.sessions.errors import ApiError, session_gone
from miles_core.sessions.journal import SUFFIX, Journal, Stored
from miles_core.sessions.protocol import EndReason, SessionRequest
from miles_core.sessions.session import Session, session_key

LOCK = "lock"

log = logging.getLogger("miles.sessions")


@dataclass(frozen=True)
class Limits:
    """When a session leaves memory, and when it ends, in seconds without a request."""

    spill_s: float
    expiry_s: float


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """While this process alone works in a folder. Raises UserError when another one does."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UserError(
            f"--spill-dir {directory}: the session server of process {holder} works in it",
            "Give each server a folder of its own.",
        ) from error
    try:
        with contextlib.suppress(OSError):  # the lock holds, who has it can only not be told
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


class SessionStore:
    """Sessions by the hash of their secret. All methods belong to the event loop's thread.

    What `directory` holds at the start is of a server that died: those sessions can be read, and
    each further call in them is refused as `session_lost`.
    """

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._directory = directory
        self._limits = limits
        self._sessions: dict[str, Session] = {}
        self._loading: dict[str, asyncio.Task[Stored]] = {}
        self._lost = {path.stem: time.monotonic() for path in directory.glob(f"*{SUFFIX}")}

    def __len__(self) -> int:
        return len(self._sessions) + len(self._lost)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def spilled(self) -> int:
        """How many open sessions have left memory."""
        return sum(session.loaded is None for session in self) + len(self._lost)

    def journal(self, session: Session) -> Journal:
        return Journal(self._directory / f"{session.key}{SUFFIX}")

    def open(self, request: SessionRequest) -> Session:
        """A new session. Raises `ApiError` when the disk does not take it."""
        session = Session(request)
        try:
            self.journal(session).create(request)
        except OSError as error:
            raise disk_failed(error) from error
        self._sessions[session.key] = session
        return session

    def check(self, session_id: str) -> None:
        """Raise `ApiError` when there is no such session."""
        key = session_key(session_id)
        if key not in self._sessions and key not in self._lost:
            raise session_gone()

    async def get(self, session_id: str) -> Session:
        """The session with its tree in memory. Raises `ApiError` when there is none."""
        key = session_key(session_id)
        session = self._sessions.get(key)
        if session is None:
            if key not in self._lost:
                raise session_gone()
            journal = Journal(self._directory / f"{key}{SUFFIX}")
            restored = await asyncio.to_thread(_restore, journal, session_id)
            session = self._sessions.setdefault(key, restored)
            self._lost.pop(key, None)
        session.used = time.monotonic()
        if session.loaded is None:
            await self._load(session)
        return session

    async def _load(self, session: Session) -> None:
        """Bring a spilled tree back; requests that come together share one reading."""
        task = self._loading.get(session.key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self.journal(session).read))
            self._loading[session.key] = task
        try:
            stored = await asyncio.shield(task)
        except (OSError, ValueError) as error:
            raise session_gone() from error
        finally:
            self._loading.pop(session.key, None)
        if session.loaded is None:
            session.loaded = stored.tree
            session.lost = session.lost or stored.damaged
            session.end_reason = stored.end_reason

    def end(self, session: Session, reason: EndReason | None) -> None:
        """Note why a call of a session was refused; None: a call was answered."""
        if session.end_reason == reason:
            return
        session.end_reason = reason
        try:
            self.journal(session).end(reason)
        except OSError as error:
            log.warning("session %s: %s", session.name, error)

    def unseen(self, session: Session, rid: str) -> None:
        """Note that nobody was there to have the answer of a call."""
        turns = [] if session.loaded is None else session.loaded.turns
        for turn in turns[::-1]:
            if turn.rid == rid:
                turn.unseen = True
                try:
                    self.journal(session).unseen(turn)
                except OSError as error:
                    log.warning("session %s: %s", session.name, error)
                return

    async def close(self, session: Session) -> None:
        """End a session and what runs in it, and forget it."""
        session.closed = True
        self._sessions.pop(session.key, None)
        await session.calls.cancel(session_gone())
        self.journal(session).remove()

    async def tidy(self) -> None:
        """Let idle sessions leave memory, and end those that nobody has used for long."""
        now = time.monotonic()
        for session in self:
            if session.calls.running:
                session.used = now
            idle = now - session.used
            if idle > self._limits.expiry_s:
                log.warning("session %s ends: unused for %.0f s", session.name, idle)
                await self.close(session)
            elif idle > self._limits.spill_s:
                session.loaded = None
        for key, since in list(self._lost.items()):
            if now - since > self._limits.expiry_s:
                del self._lost[key]
                Journal(self._directory / f"{key}{SUFFIX}").remove()


def _restore(journal: Journal, session_id: str) -> Session:
    try:
        stored = journal.read()
    except (OSError, ValueError) as error:
        raise session_gone() from error
    return Session(stored.request, session_id, stored.tree, stored.end_reason, lost=True)


def disk_failed(error: OSError) -> ApiError:
    """The disk refuses what would have to outlive the server."""
    text = f"the session server cannot write: {error.strerror or error}"
    return ApiError(503, "disk_failed", text)
