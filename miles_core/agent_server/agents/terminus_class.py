"""Harbor's Terminus2 without litellm, which costs three seconds of imports and is not used here.

Terminus2 imports litellm through two modules of Harbor, for the model that it makes. Ours gets
another model, so while the class is imported these two are stood in for by modules that hold the
names which the import asks for. The copy of the class that this makes is known here only: any
other import of Harbor's agent finds it whole.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harbor.agents.terminus_2 import Terminus2

PACKAGE = "harbor.agents.terminus_2"


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this copy of Terminus2 was imported without litellm")


STAND_INS: dict[str, dict[str, Any]] = {
    "harbor.llms.lite_llm": {"LiteLLM": _unused},
    "harbor.llms.litellm_config": {
        "LITELLM_BASE_URL_OVERRIDES": {},
        "configure_litellm_debug": _unused,
        "litellm_api_base": lambda *args, **kwargs: None,
        "litellm_credential_kwargs": lambda *args, **kwargs: {},
    },
}
"""What Terminus2 imports, and what its constructor calls even with a model of another kind."""


def import_terminus() -> type[Terminus2]:
    """The class; imported whole where litellm is loaded already."""
    if "litellm" in sys.modules:
        from harbor.agents.terminus_2 import Terminus2

        return Terminus2
    for name, values in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        from harbor.agents.terminus_2 import Terminus2

        return Terminus2
    finally:
        for name in [*STAND_INS, *sys.modules]:
            if name in STAND_INS or name.startswith(PACKAGE):
                sys.modules.pop(name, None)
