"""Megatron-core models: layers, Hugging Face mapping, process groups, optimizer, sharded state.

megatron-core is imported nowhere else. This package prepares it before any of its modules can be
imported: without CUDA, device literals in megatron's source are rewritten (`cpu_shim`). What reads
configurations alone (`hf_config`, `families`) needs neither megatron nor torch.
"""

import warnings
from typing import TYPE_CHECKING

from miles_core.modeling import cpu_shim

if TYPE_CHECKING:
    ON_CPU: bool

# What megatron-core and torch say about extensions that are absent on purpose, and about their
# own deprecated calls.
for _text in ("Transformer Engine and Apex", "Apex is not installed", "full scope is deprecated"):
    warnings.filterwarnings("ignore", message=_text)
for _text in ("`load_state_dict` is deprecated", "Please use DTensor"):
    warnings.filterwarnings("ignore", message=_text, category=FutureWarning)
for _text in (
    "(?s).*transformer_engine.*is deprecated",
    "The following imports from `dynamic_cont",
):
    warnings.filterwarnings("ignore", message=_text, category=DeprecationWarning)

cpu_shim.install()


def __getattr__(name: str) -> bool:
    """`ON_CPU`: whether this process computes on the CPU. Found out when it is first asked for."""
    if name == "ON_CPU":
        return cpu_shim.on_cpu()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
