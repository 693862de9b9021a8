"""A Qwen3-MoE with a tokenizer of its own that solves some of the example tasks:
`python moe_model.py DIRECTORY`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from miles_core.modelinit.recipe import load_recipe
from miles_core.modelinit.warm import batches, demo_makers, prepare
from miles_core.sessions.families import load_family
from miles_core.training.sft import run_sft

RECIPE = Path(__file__).parents[2] / "examples" / "models" / "tiny.toml"
STEPS = 120


def write_random_moe(directory: Path) -> None:
    """The dense random model of a directory becomes one of four experts, two for each token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = json.loads((directory / "config.json").read_text())
    for name in ("architectures", "model_type", "dtype", "transformers_version"):
        dense.pop(name, None)
    config = Qwen3MoeConfig(
        **dense,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=dense["intermediate_size"] // 2,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    (directory / "model.safetensors").unlink()
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def make(directory: Path) -> None:
    """Random weights, then supervised steps on demonstrations, as `miles model init` makes them."""
    recipe = load_recipe(RECIPE)
    options = recipe.warm_start
    with tempfile.TemporaryDirectory() as name:
        initial = Path(name) / "initial"
        initial.mkdir()
        prepare(recipe, initial)
        write_random_moe(initial)
        learned, _ = demo_makers(recipe, load_family(initial))
        run_sft(
            str(initial),
            str(directory),
            batches(learned, options.batch_size),
            lr=options.lr,
            steps=STEPS,
            warmup_steps=options.lr_warmup_steps,
            seed=recipe.seed,
        )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
