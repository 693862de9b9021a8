"""Start and save of a trainer that trains adapters: the model under them is never written again."""

from __future__ import annotations

from pathlib import Path

from miles_core.checkpoints import adapters
from miles_core.training.policy import Policy


def load_with_adapters(policy: Policy, load: str, base: str | None) -> bool:
    """Load the frozen model, and the adapters of a checkpoint; those begun on a converted model
    stay as they are. Whether there was a checkpoint. Collective.

    `base`: where the model under a checkpoint's adapters is (default: where it was), or the same
    model as `load`. Raises ValueError when it is another one, or when the checkpoint's adapters are
    not those of the configuration.
    """
    policy.load_base(adapters.find_base(load, base))
    saved = adapters.read(load)
    if saved is None:
        policy.optimizer.weights_were_replaced()
        return False
    assert policy.model.lora is not None
    settings = policy.model.lora.settings
    configured = {
        "lora_rank": (saved.rank, settings.rank),
        "lora_alpha": (saved.alpha, settings.alpha),
        "target_modules": (saved.modules, policy.model.lora.kinds),
    }
    for name, (there, here) in configured.items():
        if there != here:
            raise ValueError(f"{load} was saved with {name} {there}, not {here}")
    return policy.load(load)


def describe_adapters(policy: Policy, directory: str) -> None:
    """Say in a checkpoint which adapters it holds, if the policy has some."""
    if policy.model.lora is None:
        return
    assert policy.base is not None
    settings = policy.model.lora.settings
    content = adapters.Adapters(
        rank=settings.rank,
        alpha=settings.alpha,
        modules=policy.model.lora.kinds,
        base_fingerprint=adapters.model_fingerprint(policy.base),
        base=str(Path(policy.base).absolute()),
    )
    adapters.write(directory, content)
