import sys
from pathlib import Path

import pytest
import torch

for folder in ("training", "modeling"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are of CUDA."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
