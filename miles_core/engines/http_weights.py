"""SGLang's routes of a weight update in parts, over `WeightUpdates`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from miles_core.engines.sampling import RequestError
from miles_core.engines.updates import GROUP_TIMEOUT_S, WeightUpdates

Body = dict[str, Any]
Answer = tuple[int, Any]


def weight_routes(updates: WeightUpdates) -> dict[str, Callable[[Body], Awaitable[Answer]]]:
    """The handlers by path. A refusal answers 400 with `success` false and changes nothing."""

    async def begin(body: Body) -> Answer:
        version, base = _version(body), _optional(body, "base")
        await asyncio.to_thread(updates.begin, version, base)
        return 200, {"success": True, "message": "weight update open"}

    async def from_tensor(body: Body) -> Answer:
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or not all(isinstance(p, str) for p in payloads):
            raise RequestError("serialized_named_tensors must be a list of strings")
        _load_format(body)
        await asyncio.to_thread(updates.from_payload, payloads, _version(body))
        return 200, {"success": True, "message": "tensors taken"}

    async def from_distributed(body: Body) -> Answer:
        for name in ("names", "dtypes", "shapes"):
            if not isinstance(body.get(name), list):
                raise RequestError(f"{name} must be a list")
        _load_format(body)
        group = _optional(body, "group_name") or "weight_update_group"
        await asyncio.to_thread(
            updates.from_group,
            group,
            body["names"],
            [str(dtype) for dtype in body["dtypes"]],
            body["shapes"],
            _version(body),
        )
        return 200, {"success": True, "message": "tensors taken"}

    async def init_group(body: Body) -> Answer:
        await asyncio.to_thread(
            updates.join,
            _optional(body, "group_name") or "weight_update_group",
            _optional(body, "master_address") or "",
            _integer(body, "master_port"),
            _integer(body, "rank_offset"),
            _integer(body, "world_size"),
            _optional(body, "backend") or "nccl",
            float(body.get("timeout_s", GROUP_TIMEOUT_S)),
        )
        return 200, {"success": True, "message": "group joined"}

    async def destroy_group(body: Body) -> Answer:
        updates.leave(_optional(body, "group_name") or "weight_update_group")
        return 200, {"success": True, "message": "group left"}

    async def end(body: Body) -> Answer:
        message = await asyncio.to_thread(updates.end, body)
        return 200, {"success": True, "message": message}

    return {
        "/begin_weight_update": begin,
        "/update_weights_from_tensor": from_tensor,
        "/update_weights_from_distributed": from_distributed,
        "/init_weights_update_group": init_group,
        "/destroy_weights_update_group": destroy_group,
        "/end_weight_update": end,
    }


def _version(body: Body) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


def _optional(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} must be a string")
    return value


def _integer(body: Body, name: str) -> int:
    value = body.get(name)
    if type(value) is not int:
        raise RequestError(f"{name} must be an integer")
    return value


def _load_format(body: Body) -> None:
    if body.get("load_format") is not None:
        raise RequestError(f"load_format {body['load_format']!r} is not supported")
