"""prefect.yaml says what the presets say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles_core.config.keys import all_keys

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = {
    d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
}


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_parameters_are_those_of_the_preset(name: str) -> None:
    wanted: dict[str, Any] = tomllib.loads((ROOT / "presets" / f"{name}.toml").read_text())
    for section, table in wanted.items():
        for key, value in table.items():
            if all_keys()[f"{section}.{key}"].is_path:
                table[key] = "{{ $MILES_HOME }}/" + value
    wanted["run"] = {**wanted.get("run", {}), "runs_dir": "{{ $MILES_HOME }}/runs"}
    wanted["preset"] = name
    found = DEPLOYMENTS[name]["parameters"]["config"]
    assert found == wanted, f"copy presets/{name}.toml into the deployment in prefect.yaml"


def test_a_dying_worker_leaves_its_flows_alone() -> None:
    assert set(DEPLOYMENTS) == {"learn", "quickstart"}
    for deployment in DEPLOYMENTS.values():
        pool = deployment["work_pool"]
        assert pool["name"] == "miles-process"
        assert pool["job_variables"]["stream_output"] is False
        assert pool["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
        assert [s["active"] for s in deployment["schedules"]] == [False]
        assert (ROOT / deployment["entrypoint"].partition(":")[0]).is_file()
