"""Megatron-core models: layers, Hugging Face mapping, process groups, optimizer, sharded state.

megatron-core is imported nowhere else. This package prepares it before any of its modules can be
imported: without CUDA, device literals in megatron's source are rewritten (`cpu_shim`).
"""

import warnings

from miles_core.modeling.cpu_shim import install

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

ON_CPU = install()
