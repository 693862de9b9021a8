"""What a Hugging Face directory says about its model, checked for what is supported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.modeling.rope import RopeScaling, read_scaling


class UnsupportedModel(ValueError):
    """A Hugging Face model that cannot be mapped; the message names the reason."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: softmax (`sigmoid` false) or sigmoid scores, the `top_k` best chosen.

    `normalize`: the chosen scores sum to 1 before they are multiplied by `scale`. `sparse` says of
    each layer whether it has experts. `shared_ffn_size` 0: no shared expert. With `bias` a
    constant per expert is added to the scores for the choice alone.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    sparse: tuple[bool, ...]
    normalize: bool = True
    sigmoid: bool = False
    bias: bool = False
    scale: float = 1.0
    shared_ffn_size: int = 0


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (arXiv 2405.04434): ranks of the latents and sizes of a head.

    `q_rank` None: queries are projected from the hidden state directly.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only model with RMSNorm, SwiGLU and rotary positions."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    qk_norm: bool
    tied: bool
    qkv_bias: bool = False
    rope_share: float = 1.0
    rope_scaling: RopeScaling | None = None
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.moe is not None and self.moe.sparse[layer]


def positive(config: dict[str, Any], field: str, default: int | None = None) -> int:
    """A whole number from 1 on; without a default it must be there."""
    value = config.get(field)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"field {field} is missing")
        value = default
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"field {field} must be a positive whole number, not {value!r}")
    return value


def number(config: dict[str, Any], field: str, default: float) -> float:
    """A number above 0."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnsupportedModel(f"field {field} must be a positive number, not {value!r}")
    return float(value)


def rope_values(config: dict[str, Any], head_dim: int, partial: float | None) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and the rotated share of a head, `rope_share`.

    `partial` is the family's share, None for those that rotate the whole head.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"field rope_parameters must be an object, not {rope!r}")
    fields = {"partial_rotary_factor": config.get("partial_rotary_factor")}
    fields |= {name: value for name, value in rope.items() if value is not None}
    share = number(fields, "partial_rotary_factor", partial or 1.0)
    if share > 1 or (partial is None and share != 1.0):
        raise UnsupportedModel(
            f"partial_rotary_factor {share:g} is not supported for {config['model_type']}"
        )
    if int(head_dim * share) % 2 or int(head_dim * share) == 0:
        raise UnsupportedModel(
            f"partial_rotary_factor {share:g} of head_dim {head_dim} rotates "
            f"{int(head_dim * share)} dimensions, which are no pairs"
        )
    try:
        scaling = read_scaling(rope, positive(config, "max_position_embeddings", 32768))
    except ValueError as error:
        raise UnsupportedModel(f"rope_parameters: {error}") from None
    if scaling is not None and scaling.cosine_scale != 1.0 and share != 1.0:
        raise UnsupportedModel(
            "rope_parameters: an attention_factor with a partial_rotary_factor is not supported"
        )
    theta = number(
        {"rope_theta": rope.get("rope_theta") or config.get("rope_theta")}, "rope_theta", 10000.0
    )
    return {"rope_theta": theta, "rope_share": share, "rope_scaling": scaling}


def common_values(
    config: dict[str, Any],
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    norm_eps: float = 1e-6,
    partial: float | None = None,
) -> dict[str, Any]:
    """Fields of ModelSpec that all families write alike.

    The keywords are the family's defaults for fields that its config.json may lack; without
    `head_dim` it is hidden_size / num_attention_heads, without `kv_heads` the field must be there.
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    groups = positive(config, "num_key_value_heads", kv_heads)
    if heads % groups:
        raise UnsupportedModel(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    size = positive(config, "head_dim", head_dim or hidden // heads)
    return {
        "model_type": config["model_type"],
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": hidden,
        "ffn_size": positive(config, "intermediate_size"),
        "num_layers": positive(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": size,
        "norm_eps": number(config, "rms_norm_eps", norm_eps),
        "max_positions": positive(config, "max_position_embeddings", 32768),
        "tied": bool(config.get("tie_word_embeddings", False)),
        **rope_values(config, size, partial),
    }


def checked(moe: MoeSpec) -> MoeSpec | None:
    """The experts, or None where no layer has any. Raises UnsupportedModel."""
    if not any(moe.sparse):
        return None
    if moe.top_k > moe.num_experts:
        raise UnsupportedModel(
            f"num_experts_per_tok {moe.top_k} is more than the {moe.num_experts} experts"
        )
    return moe


def refuse(config: dict[str, Any], *flags: str) -> None:
    """Raise UnsupportedModel for the first of the flags that is set."""
    for flag in flags:
        if config.get(flag):
            raise UnsupportedModel(f"{flag} is not supported for {config['model_type']}")


def read_spec(hf_dir: str | Path) -> ModelSpec:
    """The model of a directory with config.json.

    Raises FileNotFoundError without a config.json and UnsupportedModel, naming file and field, for
    another architecture or a field that is missing, wrong or would have to be computed otherwise.
    """
    from miles_core.modeling.families import FAMILIES

    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; is {hf_dir} a Hugging Face directory?")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"{path}: model_type {kind!r} is not supported, only {', '.join(FAMILIES)}"
        )
    try:
        refuse(config, "mlp_bias", "use_sliding_window", "quantization_config")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported")
        return FAMILIES[kind].read(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None
