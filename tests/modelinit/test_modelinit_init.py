"""Making a model from a recipe, end to end with three steps of training."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from miles_core.errors import UserError
from miles_core.modelinit.init import ensure_model, init_model, model_info
from miles_core.modelinit.recipe import load_recipe
from miles_core.modelinit.sampling import sample

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = """
seed = {seed}
tasks_dir = "{examples}/tasks"
agent_config = "{examples}/agents/terse.yaml"
[shape]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 32
[warm_start]
batch_size = 4
max_steps = 3
check_every = 2
check_goals = 2
check_below_loss = 100.0
target_success = 1.0
threads = 1
"""


def write_recipe(directory: Path, seed: int = 0) -> Path:
    path = directory / f"small{seed}.toml"
    path.write_text(RECIPE.format(examples=EXAMPLES, seed=seed))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    progress = []
    info = init_model(write_recipe(directory), directory / "model", progress.append)
    return info, progress, directory


def test_the_model_is_whole(made):
    info, progress, directory = made
    assert info.made and info.steps == 3 and info.success is not None and not info.reached_target
    assert [p["step"] for p in progress] == [2, 3]
    assert progress[-1]["eta_s"] == 0 and progress[0]["success"] is not None
    model = Qwen3ForCausalLM.from_pretrained(info.path)
    tokenizer = AutoTokenizer.from_pretrained(info.path)
    assert sum(p.numel() for p in model.parameters()) == info.parameters
    assert model.config.vocab_size == info.vocab_size >= len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sorted(p.name for p in directory.iterdir()) == ["model", "small0.toml"]


def test_cached_once_made_again_when_damaged_and_deterministic(made, tmp_path):
    info, _, directory = made
    recipe = write_recipe(directory)
    first = ensure_model(recipe, tmp_path)
    assert first.made
    # The same seed gives the same bytes, here and in the fixture.
    assert first.files == info.files
    assert ensure_model(recipe, tmp_path) == dataclasses.replace(first, made=False)
    (Path(first.path) / "config.json").write_text("{}")
    assert model_info(Path(first.path)) is None
    assert ensure_model(recipe, tmp_path).made
    assert model_info(Path(first.path)) is not None


def test_another_recipe_is_another_model(tmp_path):
    from miles_core.modelinit.init import recipe_fingerprint

    recipes = [load_recipe(write_recipe(tmp_path, seed)) for seed in (0, 1)]
    assert recipe_fingerprint(recipes[0]) != recipe_fingerprint(recipes[1])


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UserError, match="already holds"):
        init_model(write_recipe(tmp_path), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seed", "sed"), "sed: Extra inputs"),
        (("batch_size = 4", "batch_size = 0"), "warm_start.batch_size"),
        (("/tasks", "/nothing"), "tasks_dir .*does not exist"),
        (("[shape]", "[shape"), "no TOML"),
    ],
)
def test_a_wrong_recipe_names_its_mistake(tmp_path, change, message):
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(UserError, match=message):
        load_recipe(path)


def test_the_example_recipe_is_sound():
    recipe = load_recipe(EXAMPLES / "models" / "tiny.toml")
    assert recipe.tasks_dir == EXAMPLES / "tasks"


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "miles_cli.main", "model", "init", "--json"]
    command += ["--recipe", str(write_recipe(tmp_path)), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(tmp_path / "out")
    assert "step 2 of at most 3" in done.stderr
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "already holds" in again.stderr


def test_sampling_follows_the_distribution_of_each_prompt(made):
    """Padding and the cache change nothing: frequencies match the model's own probabilities."""
    model = Qwen3ForCausalLM.from_pretrained(made[0].path).eval()
    short, long = [5, 6], [7, 8, 9, 10, 11]
    answers = sample(model, [short, long] * 400, 258, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for place, prompt in enumerate((short, long)):
            expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
            firsts = torch.tensor([a[0] for a in answers[place::2]])
            seen = torch.bincount(firsts, minlength=len(expected)) / 400
            likely = expected.topk(5).indices
            assert torch.allclose(seen[likely], expected[likely], atol=0.08)
    assert all(len(a) <= 48 and 258 not in a[:-1] for a in answers)
