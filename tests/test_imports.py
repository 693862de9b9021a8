"""Import rules that a static check cannot see: what an import really loads."""

import subprocess
import sys

import pytest

HEAVY = "{'torch', 'ray', 'wandb', 'pyarrow', 'transformers', 'megatron'}"


def loaded(modules: str) -> str:
    code = f"import sys, {modules}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "modules",
    [
        "flows.train",
        "miles_cli.main",
        "miles_core.config.load",
        "miles_core.runs.status",
        "miles_core.agent_server.client",
        "miles_core.agent_server.protocol",
        "miles_core.sessions.client",
        "miles_core.sessions.protocol",
        "miles_core.engines.client",
        "miles_core.modeling.families",
        "miles_core.preflight.checks",
    ],
)
def test_light_modules_load_nothing_heavy(modules: str) -> None:
    assert loaded(modules) == "[]"


def test_the_check_sees_a_heavy_import() -> None:
    assert loaded("pyarrow") == "['pyarrow']"
