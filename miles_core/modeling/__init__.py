"""Megatron-core models: layers, Hugging Face mapping, process groups, optimizer, sharded state.

megatron-core is imported nowhere else. This package prepares it before any of its modules can be
imported: without CUDA, device literals in megatron's source are rewritten (`cpu_shim`).
"""

from miles_core.modeling.cpu_shim import install

ON_CPU = install()
