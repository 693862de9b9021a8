"""Run megatron-core 0.16.1 where there is no CUDA.

megatron-core names CUDA devices in its source. An import hook rewrites those places in the syntax
tree of `megatron.core` modules while they are imported:

| in the source | becomes |
|---|---|
| `torch.cuda.X` | `cpu_cuda.CpuCuda.X`, which does nothing or answers for the CPU |
| `device="cuda"`, `torch.device("cuda", ...)` | the CPU |
| `tensor.cuda(...)` | `tensor.cpu()` |
| `pin_memory=True` | `pin_memory=False` |
| `"torch.cuda.FloatTensor"` and its like | `"torch.FloatTensor"` (type names in the optimizers) |

With CUDA nothing is changed. Torch is not imported before megatron.core is.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import marshal
import os
import sys
from functools import cache
from importlib.util import cache_from_source, source_hash
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_NAMESPACE = "_cpu_cuda"
_TYPE_NAMES = {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}


def _is_torch_cuda(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    )


def _is_text(node: ast.AST, start: str) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(start)
    )


class _ToCpu(ast.NodeTransformer):
    """The table at the top of this module."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _is_torch_cuda(node):
            return ast.copy_location(ast.Name(_NAMESPACE, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value in _TYPE_NAMES:
            return ast.copy_location(ast.Constant(_TYPE_NAMES[node.value]), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "device" and _is_text(node.value, "cuda"):
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant):
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr == "cuda":
                function.attr, node.args, node.keywords = "cpu", [], []
            elif function.attr == "device" and node.args and _is_text(node.args[0], "cuda"):
                node.args = [ast.copy_location(ast.Constant("cpu"), node.args[0])]
        return node


@cache
def _version() -> str:
    return source_hash(Path(__file__).read_bytes()).hex()


def _read_code(path: str, digest: bytes) -> CodeType | None:
    """What `_Loader` wrote of the source with this hash; None: nothing that can be read."""
    try:
        data = Path(path).read_bytes()
        code = marshal.loads(data[len(digest) :]) if data.startswith(digest) else None
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten tree; line numbers stay those of the file.

    The code is kept beside Python's own compiled files, under a name that holds the version of this
    module, with the hash of the source before it.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if b"cuda" not in source and b"pin_memory" not in source:
            return super().get_code(fullname)
        kept, digest = cache_from_source(path, optimization=f"cpu{_version()}"), source_hash(source)
        code = _read_code(kept, digest)
        if code is None:
            tree = ast.fix_missing_locations(_ToCpu().visit(ast.parse(source, path)))
            code = compile(tree, path, "exec", dont_inherit=True)
            if not sys.dont_write_bytecode:
                self.set_data(kept, digest + marshal.dumps(code))  # does nothing where it may not
        return code

    def exec_module(self, module: ModuleType) -> None:
        from miles_core.modeling.cpu_cuda import CpuCuda

        setattr(module, _NAMESPACE, CpuCuda())
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Gives every source module of megatron.core to `_Loader`."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core") or not on_cpu():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


@cache
def on_cpu() -> bool:
    """Whether this process computes on the CPU; if so, torch is told that there is nothing else."""
    import torch

    if torch.cuda.is_available():
        return False
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch._dynamo is first imported
    return True


def install() -> None:
    """Prepare the import of megatron.core.

    Raises RuntimeError when it was imported before on a machine without CUDA.
    """
    if "megatron.core" in sys.modules and on_cpu():
        raise RuntimeError("import miles_core.modeling before megatron.core")
    sys.meta_path.insert(0, _Finder())
