"""A weight update in parts at one engine, by the routes that SGLang has for it."""

from __future__ import annotations

import contextlib
from typing import Any

from miles_core.engines.client import EngineClient, EngineError

GROUP = "weight_update_group"


class WeightClient(EngineClient):
    """One engine. Every method raises EngineError when the engine refuses or is not there.

    An embedded engine (`staged`) serves its old weights until `end`, and compares what it got
    with what was sent. Any other one is given a version that no number is for as long as its
    weights are a mixture, so that nothing it samples then is taken for a version's.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__([url], load_timeout_s=timeout_s)
        self.url = self.urls[0]
        self.staged = False
        self.dtype: str | None = None

    async def look(self) -> None:
        """Learn what the engine can do."""
        info = await self._get(self.url, "/server_info")
        if not isinstance(info, dict):
            raise EngineError(f"engine {self.url}/server_info answered no object")
        self.staged = info.get("staged_weight_updates") is True
        self.dtype = info.get("dtype")

    async def version(self) -> int:
        """The version that is served."""
        return await self._version(self.url)

    async def begin(self, version: int, base: str | None) -> None:
        """Open an update; one that an earlier pusher left open is given up."""
        with contextlib.suppress(EngineError):
            await self._update("/end_weight_update", {})
        await self._update("/flush_cache", {})
        if self.staged:
            body = {"weight_version": str(version), **({"base": base} if base else {})}
            await self._update("/begin_weight_update", body)
            return
        await self._name_version(f"incomplete-{version}")
        await self._update("/begin_weight_update", {})

    async def take(self, payload: str) -> None:
        """Read tensors that lie in shared memory of this machine."""
        body = {"serialized_named_tensors": [payload], "flush_cache": False}
        await self._update("/update_weights_from_tensor", body)

    async def join(
        self, host: str, port: int, rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        """Join the group of trainer (rank 0) and engines."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": size,
            "group_name": GROUP,
            "backend": backend,
        }
        if self.staged:
            body["timeout_s"] = timeout_s
        await self._update("/init_weights_update_group", body)

    async def receive(self, tensors: list[tuple[str, list[int], str]]) -> None:
        """Take tensors (name, shape, dtype) that the trainer broadcasts in this order."""
        body = {
            "names": [name for name, _, _ in tensors],
            "shapes": [shape for _, shape, _ in tensors],
            "dtypes": [dtype for _, _, dtype in tensors],
            "group_name": GROUP,
            "flush_cache": False,
        }
        await self._update("/update_weights_from_distributed", body)

    async def leave(self) -> None:
        """Leave that group."""
        await self._update("/destroy_weights_update_group", {"group_name": GROUP})

    async def end(self, version: int, digest: str, tensors: int, size: int) -> None:
        """Serve what was sent under `version`: so many tensors and bytes with that digest."""
        if self.staged:
            announced = {"weight_version": str(version), "digest": digest}
            body = {**announced, "tensors": tensors, "bytes": size}
            await self._update("/end_weight_update", body)
        else:
            await self._update("/end_weight_update", {})
            await self._update("/flush_cache", {})
            await self._name_version(str(version))
        await self._expect(self.url, version)

    async def give_up(self) -> None:
        """Close an update without serving it; an engine that is not there is let be."""
        with contextlib.suppress(EngineError):
            await self._post(self.url, "/end_weight_update", {})

    async def digest(self) -> dict[str, Any]:
        """`weight_version`, `digest` and `tensors` of what is served; of embedded engines alone."""
        found = await self._get(self.url, "/weights_digest", self.load_timeout_s)
        if not isinstance(found, dict):
            raise EngineError(f"engine {self.url}/weights_digest answered no object")
        return found

    async def _name_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._update("/update_weight_version", body)

    async def _update(self, route: str, body: dict[str, Any]) -> None:
        answer = await self._post(self.url, route, body, self.load_timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"engine {self.url}{route}: {answer.get('message')}")
