"""Impossible layouts of trainer ranks are refused with the nearest possible one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.config.layout import (
    ModelShape,
    Sizes,
    layout_error,
    layout_faults,
    nearest_layout,
    read_model_shape,
    tokens_needed,
)
from miles_core.config.schema import TrainingConfig

DENSE = ModelShape((("heads", 8), ("key-value heads", 2)), (), layers=6, experts=0)
SPARSE = ModelShape((("heads", 8),), (("moe_intermediate_size", 24),), layers=6, experts=4)


def error(ranks: int, model: ModelShape | None, **changes: object) -> str | None:
    return layout_error(ranks, TrainingConfig(num_trainer_ranks=ranks, **changes), model)


def test_the_message_names_the_reason_and_the_flags_of_the_nearest_layout() -> None:
    text = error(4, DENSE, tensor_model_parallel_size=4)
    assert text is not None and "2 key-value heads are not a multiple of tensor 4" in text
    assert text.endswith("of 4 ranks: --tensor-model-parallel-size 2")
    assert error(4, DENSE, tensor_model_parallel_size=2) is None


@pytest.mark.parametrize(
    ("ranks", "changes", "reason", "flags"),
    [
        (3, {"tensor_model_parallel_size": 2}, "3 ranks", "--tensor-model-parallel-size 1"),
        (4, {"pipeline_model_parallel_size": 4}, "6 layers", "--pipeline-model-parallel-size 2"),
        (2, {"tensor_model_parallel_size": 2}, "need sequence", "--sequence-parallel"),
        (2, {"sequence_parallel": True}, "there is one", "--no-sequence-parallel"),
        (8, {"expert_model_parallel_size": 8}, "4 experts", "--expert-model-parallel-size 4"),
        (3, {"expert_model_parallel_size": 2}, "3 ranks", "--expert-model-parallel-size 1"),
    ],
)
def test_each_rule(ranks: int, changes: dict[str, object], reason: str, flags: str) -> None:
    text = error(ranks, SPARSE, **changes)
    assert text is not None and reason in text and text.endswith(flags)


def test_experts_of_a_dense_model_are_refused() -> None:
    assert "0 experts" in (error(2, DENSE, expert_model_parallel_size=2) or "")


@pytest.mark.parametrize("ranks", [4096, 2520, 1_000_000_007])
def test_a_mistyped_number_of_ranks_is_answered_too(ranks: int) -> None:
    """Numbers with many divisors, or so large that they cannot be counted up to."""
    for model in (None, DENSE, SPARSE):
        text = error(ranks, model, tensor_model_parallel_size=11)
        assert text is not None and f"of {ranks} ranks: --tensor-model-parallel-size" in text


sizes = st.sampled_from([1, 2, 3, 4, 8])


@given(st.integers(1, 16), sizes, sizes, sizes, sizes, st.booleans())
def test_the_nearest_layout_is_possible_and_a_possible_one_is_its_own_nearest(
    ranks: int, tensor: int, pipeline: int, context: int, expert: int, sequence: bool
) -> None:
    wished = Sizes(tensor, pipeline, context, expert, sequence)
    for model in (DENSE, SPARSE, None):
        best = nearest_layout(ranks, wished, model)
        assert not list(layout_faults(ranks, best, model))
        if not list(layout_faults(ranks, wished, model)):
            assert best == wished


def test_the_shape_is_read_from_config_json(tmp_path: Path) -> None:
    config = {
        "vocab_size": 100,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "intermediate_size": 10240,
        "num_hidden_layers": 46,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    assert shape.experts == 64 and shape.layers == 46
    assert dict(shape.cut)["kv_lora_rank and qk_rope_head_dim together"] == 576
    text = error(8, shape, tensor_model_parallel_size=8, sequence_parallel=True)
    assert text is not None and "20 attention heads" in text
    assert text.endswith("--tensor-model-parallel-size 4")


def test_padding_counts_against_the_limit() -> None:
    training = TrainingConfig(
        num_trainer_ranks=4,
        context_parallel_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    assert tokens_needed(TrainingConfig(), 1001) == 1001
    # padded to 1004 = 2 x 2 chunks, and room for 4 more tokens, over two ranks
    assert tokens_needed(training, 1001) == 504
