"""Whether routing replay is possible: a model with experts, and engines that tell of them."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import httpx

from miles_core.config.schema import MilesConfig
from miles_core.modeling.hf_config import MoeSpec, read_spec

_PROMPT = [0, 0, 0]
_EXPERT_BYTES = 4


def dense_model_fault(config: MilesConfig, directory: Path) -> tuple[str, str, str] | None:
    """(field, problem, fix) when routing replay is asked for and the model has no experts."""
    names = _wanted(config)
    if not names or read_spec(directory).moe is not None:
        return None
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
    text = f"the model in {directory} has no experts, so there is no routing to replay"
    return f"training.{names[0]}", text, f"leave out {flags}"


def _wanted(config: MilesConfig) -> list[str]:
    names = ("use_routing_replay", "use_rollout_routing_replay")
    return [name for name in names if getattr(config.training, name)]


def _row_sizes(moe: MoeSpec) -> set[int]:
    """Bytes of a token's row: of all layers, or of those with experts."""
    return {layers * moe.top_k * _EXPERT_BYTES for layers in (len(moe.sparse), sum(moe.sparse))}


async def engine_fault(config: MilesConfig, url: str, http: httpx.AsyncClient) -> str | None:
    """Why an engine that answers cannot be used for `use_rollout_routing_replay`, or None.

    Samples one token behind a short prompt.
    """
    directory = config.model.hf_checkpoint
    if not config.training.use_rollout_routing_replay or directory is None:
        return None
    moe = read_spec(directory).moe
    if moe is None:
        return None
    body = {
        "input_ids": _PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_routed_experts": True,
    }
    answer = await http.post(f"{url.rstrip('/')}/generate", json=body)
    if answer.status_code >= 400:
        return f"{url}/generate answers {answer.status_code}: {answer.text[:200]}"
    try:
        encoded = answer.json()["meta_info"]["routed_experts"]
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, KeyError, TypeError, binascii.Error):
        return f"the engine at {url} does not tell to which experts a token went"
    rows = len(_PROMPT)  # of each token but the last
    if len(data) not in {rows * size for size in _row_sizes(moe)}:
        return (
            f"the engine at {url} gives {len(data)} bytes of routed experts for {rows} tokens; of "
            f"this model it would be {rows} rows of "
            + " or ".join(str(size) for size in sorted(_row_sizes(moe)))
        )
    return None
