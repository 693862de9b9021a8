"""Make and warm-start a model, in a process of its own: `python -m miles_core.modelinit.warm`.

Progress goes to stdout, one JSON object per line, the last one with the key "result".
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.modelinit.demos import DemoMaker, Prompts, fixed_words, read_patterns, words_of
from miles_core.modelinit.recipe import Recipe, Shape, load_recipe
from miles_core.modelinit.sampling import success_rate
from miles_core.modelinit.tokenizer import END_OF_TURN, PAD, write_tokenizer
from miles_core.sessions.families import ChatFamily, load_family
from miles_core.sessions.families.terse import TEMPLATE

if TYPE_CHECKING:
    from miles_core.training.worker import TrainerWorker

_CHECK_SEED = 1_000_003


def write_random_model(directory: Path, shape: Shape, vocab_size: int, seed: int) -> int:
    """A Qwen3 with random weights beside a tokenizer; returns the number of parameters."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(directory)
    values: dict[str, Any] = {
        **shape.model_dump(),
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**values))
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def prepare(recipe: Recipe, directory: Path) -> tuple[int, int]:
    """Write tokenizer and random model; returns parameters and vocabulary size."""
    patterns, _ = read_patterns(recipe.tasks_dir)
    words = fixed_words(patterns) + words_of(Prompts.load(recipe.agent_config).system)
    template = TEMPLATE.read_text("utf-8")
    tokens = write_tokenizer(directory, words, template)
    # Rows of the embedding in a round number, as matrix products and parallel layouts like it.
    vocab_size = -(-tokens // 64) * 64
    return write_random_model(directory, recipe.shape, vocab_size, recipe.seed), vocab_size


def demo_makers(recipe: Recipe, family: ChatFamily) -> tuple[DemoMaker, DemoMaker]:
    """The source of what is learned, and one of the goals that are measured."""
    prompts = Prompts.load(recipe.agent_config)
    patterns, taken = read_patterns(recipe.tasks_dir)
    learned = DemoMaker(family, prompts, patterns, taken, recipe.seed)
    return learned, DemoMaker(family, prompts, patterns, taken, recipe.seed + _CHECK_SEED)


class Check:
    """Called after each step: reports, measures when due, and says when it is enough."""

    def __init__(self, recipe: Recipe, family: ChatFamily, goals: DemoMaker, work: Path) -> None:
        self.options, self.family, self.work = recipe.warm_start, family, work
        self.prompts = goals.prompts
        self.goals = [goals.goal() for _ in range(self.options.check_goals)]
        self.seed = recipe.seed
        self.success: float | None = None
        self.start = time.monotonic()

    def __call__(self, step: int, loss: float, worker: TrainerWorker) -> bool:
        options = self.options
        last = step == options.max_steps
        if step % options.check_every and not last:
            return False
        if last or loss <= options.check_below_loss:
            worker.export_hf(str(self.work / "check"))
            self.success = self.measure(self.work / "check")
        seconds = time.monotonic() - self.start
        say(
            step=step,
            steps=options.max_steps,
            loss=round(loss, 4),
            success=self.success,
            seconds=round(seconds, 1),
            eta_s=round(seconds / step * (options.max_steps - step), 1),
        )
        return self.success is not None and self.success >= options.target_success

    def measure(self, directory: Path) -> float:
        """The share of goals that the model in `directory` reaches."""
        import torch
        from transformers import Qwen3ForCausalLM

        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(self.seed)
        return success_rate(model, self.family, self.prompts, self.goals, generator)


def batches(maker: DemoMaker, size: int) -> Iterator[list[dict[str, Any]]]:
    """Endless batches of fresh demonstrations."""
    while True:
        demos = [maker.demo() for _ in range(size)]
        yield [{"tokens": demo.tokens, "loss_mask": demo.loss_mask} for demo in demos]


def warm_start(recipe: Recipe, output: Path, work: Path) -> dict[str, Any]:
    """Make the model in `work`, train it, and write it to `output`."""
    from miles_core.training.sft import run_sft

    start = time.monotonic()
    initial = work / "initial"
    initial.mkdir(parents=True)
    parameters, vocab_size = prepare(recipe, initial)
    family = load_family(initial)
    learned, goals = demo_makers(recipe, family)
    check = Check(recipe, family, goals, work)
    options = recipe.warm_start
    result = run_sft(
        str(initial),
        str(output),
        batches(learned, options.batch_size),
        lr=options.lr,
        steps=options.max_steps,
        on_step=check,
        warmup_steps=options.lr_warmup_steps,
        weight_decay=options.weight_decay,
        threads=min(options.threads, len(os.sched_getaffinity(0))),
        seed=recipe.seed,
    )
    return {
        "parameters": parameters,
        "vocab_size": vocab_size,
        "steps": len(result.losses),
        "loss": result.losses[-1],
        "success": check.success,
        "reached_target": result.stopped,
        "seconds": round(time.monotonic() - start, 1),
    }


def say(**fields: Any) -> None:
    """One line of progress."""
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start a model")
    parser.add_argument("--recipe", type=Path, required=True, help="recipe (TOML)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--work", type=Path, required=True, help="empty folder for the way there")
    args = parser.parse_args()
    say(result=warm_start(load_recipe(args.recipe), args.output, args.work))


if __name__ == "__main__":
    main()
