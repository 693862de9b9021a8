"""Sandboxes of docker and podman, found and ended through the engine's command line.

A sandbox is a compose project: containers, networks and volumes carry its name in a label, images
have it in theirs, and programs on this host that still work on it have it in their arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from miles_core.agent_server.clients import arguments, end_client
from miles_core.agent_server.reaper.left import KindFailed, Left
from miles_core.agent_server.reaper.owner import Owner

CALL_LIMIT_S = 30.0
PROJECT = "com.docker.compose.project"
"""The label that docker compose and podman-compose give to all that they make."""
LABELLED = {
    "containers": ("container", ["ls", "--all", "--quiet", "--no-trunc"]),
    "networks": ("network", ["ls", "--quiet"]),
    "volumes": ("volume", ["ls", "--quiet"]),
}
CLIENTS = frozenset({"docker", "docker-compose", "podman", "podman-compose", "buildah"})
HZ = os.sysconf("SC_CLK_TCK")


class Engine:
    """The sandboxes of one owner in docker or podman."""

    def __init__(self, program: str, owner: Owner) -> None:
        self.name = program
        self._owner = owner

    async def find(self) -> list[Left]:
        """The owner's sandboxes; raises KindFailed."""
        if shutil.which(self.name) is None:
            raise KindFailed(f"{self.name} is not on PATH")
        found: dict[str, Left] = {}
        for part, (noun, command) in LABELLED.items():
            for item in await self._labelled(noun, command):
                labels = (item.get("config") or {}).get("Labels") or item.get("labels") or {}
                part_id = str(item["name"] if noun == "volume" else item["id"])
                self._add(found, labels.get(PROJECT, ""), part, part_id, _age_s(item))
        listed = await self._call("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
        for image in listed.split():
            self._add(found, image, "images", image, None)
        for pid, words, age_s in await asyncio.to_thread(lambda: list(_clients())):
            self._add(found, words, "processes", str(pid), age_s)
        return list(found.values())

    async def remove(self, left: Left) -> None:
        """End and remove all of a sandbox; raises KindFailed with what the engine said."""
        for pid in left.parts.get("processes", ()):
            if left.id in " ".join(arguments(int(pid))):
                await end_client(int(pid))
        containers = left.parts.get("containers", [])
        if containers:
            with contextlib.suppress(KindFailed):  # those that do not run
                await self._call("kill", *containers)
            await self._call("rm", "--force", "--volumes", *containers)
        for noun, part in (("network", "networks"), ("volume", "volumes"), ("image", "images")):
            if ids := left.parts.get(part):
                await self._call(noun, "rm", *ids)

    def _add(
        self, found: dict[str, Left], text: str, part: str, part_id: str, age_s: float | None
    ) -> None:
        named = self._owner.named(text)
        if named is None:
            return
        left = found.setdefault(
            named.name, Left(self.name, named.name, named.trial, named.tag, None)
        )
        left.trial = min(left.trial, named.trial, key=len)  # an image's may have its service behind
        left.parts.setdefault(part, []).append(part_id)
        if age_s is not None:
            left.age_s = max(left.age_s or 0.0, age_s)

    async def _labelled(self, noun: str, command: list[str]) -> list[dict[str, Any]]:
        """Everything of a sort that compose has made, as the engine describes it.

        What goes away meanwhile is left out. The outer keys are in small letters.
        """
        ids = (await self._call(noun, *command, "--filter", f"label={PROJECT}")).split()
        described: list[dict[str, Any]] = []
        for at in range(0, len(ids), 50):
            some = ids[at : at + 50]
            try:
                described += json.loads(await self._call(noun, "inspect", *some))
            except KindFailed:
                for one in some:
                    with contextlib.suppress(KindFailed):
                        described += json.loads(await self._call(noun, "inspect", one))
        return [{key.lower(): value for key, value in item.items()} for item in described]

    async def _call(self, *words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *[self.name, *words],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                out, err = await process.communicate()
        except TimeoutError as error:
            raise KindFailed(f"{self.name} {words[0]}: no answer") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            said = " ".join(err.decode(errors="replace").split())[-300:]
            raise KindFailed(f"{self.name} {' '.join(words[:2])}: {said}")
        return out.decode(errors="replace")


def _age_s(item: dict[str, Any]) -> float | None:
    """Seconds since something was made, from the time that the engine gives (RFC 3339)."""
    made = item.get("created") or item.get("createdat")
    try:
        return max(0.0, time.time() - datetime.fromisoformat(str(made)).timestamp())
    except ValueError:
        return None


def _clients() -> Iterator[tuple[int, str, float]]:
    """Programs of this host that talk to an engine: pid, arguments, age in seconds."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            words = arguments(int(entry))
            if not CLIENTS.isdisjoint(os.path.basename(word) for word in words[:2]):
                stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                yield int(entry), " ".join(words), uptime - int(stat[19]) / HZ
