"""The recipe of a small model: what it learns from, its shape, and its warm start."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from miles_core.config.schema import Section
from miles_core.errors import UserError


class Shape(Section):
    """A dense Qwen3 with tied embeddings."""

    hidden_size: int = Field(192, ge=32, description="Width of the residual stream")
    num_hidden_layers: int = Field(4, ge=1, description="Layers")
    num_attention_heads: int = Field(6, ge=1, description="Query heads")
    num_key_value_heads: int = Field(6, ge=1, description="Key and value heads")
    head_dim: int = Field(32, ge=8, description="Width of a head")
    intermediate_size: int = Field(576, ge=32, description="Width of the MLP")
    max_position_embeddings: int = Field(1024, ge=128, description="Longest context")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary embedding")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation at the start")

    @model_validator(mode="after")
    def _heads(self) -> Shape:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class WarmStart(Section):
    """Supervised steps on demonstrations, until enough of what is sampled is right."""

    batch_size: int = Field(32, ge=1, description="Demonstrations of one step")
    lr: float = Field(2e-3, gt=0, description="Learning rate after its warm-up")
    lr_warmup_steps: int = Field(50, ge=0, description="Steps over which it rises")
    weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay")
    max_steps: int = Field(800, ge=1, description="Steps after which it ends in any case")
    check_every: int = Field(20, ge=1, description="Steps between two measurements")
    check_below_loss: float = Field(0.2, gt=0, description="Loss above which none is made")
    check_goals: int = Field(64, ge=1, description="Goals that a measurement samples, once each")
    target_success: float = Field(0.35, ge=0, le=1, description="Share of goals that ends it")
    threads: int = Field(2, ge=1, description="Threads that compute")


class Recipe(Section):
    """Paths are relative to the recipe's own folder."""

    seed: int = Field(0, ge=0, description="Decides weights, names, and what is sampled")
    tasks_dir: Path = Field(description="Harbor tasks whose solutions are demonstrated")
    agent_config: Path = Field(description="mini-swe-agent configuration with the prompts")
    shape: Shape = Field(default_factory=Shape)
    warm_start: WarmStart = Field(default_factory=WarmStart)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe and make its paths absolute; raises UserError that names the mistake."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
        recipe = Recipe.model_validate(values)
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UserError(f"{path}: " + "; ".join(lines)) from error
    for name in ("tasks_dir", "agent_config"):
        full = (path.parent / getattr(recipe, name)).resolve()
        if not full.exists():
            raise UserError(
                f"{path}: {name} {full} does not exist",
                "Give a path relative to the recipe's folder.",
            )
        setattr(recipe, name, full)
    return recipe
