"""Loading the configuration: precedence, origins, and errors that name the place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.config.keys import Key, all_keys, find_key, sections
from miles_core.config.load import load_config
from miles_core.config.presets import ConfigError
from miles_core.config.schema import MilesConfig
from miles_core.runs.files import dumps

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "presets").glob("*.toml"))
MINIMAL = """
[data]
prompt_data = "rows.jsonl"
[model]
hf_checkpoint = "model"
[rollout]
num_rollout = 2
max_seq_len = 8192
[agent_server]
tasks_dir = "tasks"
"""


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_loads_by_name_and_path(path: Path) -> None:
    by_name = load_config(path.stem, {}, {})
    by_path = load_config(str(path), {}, {})
    assert by_name.config == by_path.config
    assert by_name.config.preset == path.stem
    assert by_name.config.data.prompt_data.is_relative_to(ROOT)
    assert by_name.config.agent_server.tasks_dir.is_absolute()


def test_presets_exist() -> None:
    assert {"quickstart", "learn", "smollm2"} <= {p.stem for p in PRESETS}


def test_precedence_and_origins(preset: Path) -> None:
    env = {"MILES_ROLLOUT__NUM_ROLLOUT": "3", "MILES_ROLLOUT__TEMPERATURE": "0.5"}
    loaded = load_config(str(preset), {"num-rollout": "4"}, env)
    assert loaded.config.rollout.num_rollout == 4
    assert loaded.config.rollout.temperature == 0.5
    assert loaded.origins["rollout.num_rollout"] == "flag --num-rollout"
    assert loaded.origins["rollout.temperature"] == "environment MILES_ROLLOUT__TEMPERATURE"
    assert loaded.origins["model.hf_checkpoint"].endswith("mine.toml")
    assert loaded.origins["rollout.top_p"] == "default"
    assert set(loaded.origins) == set(all_keys())


def test_relative_paths(preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = load_config(str(preset), {"hf-checkpoint": "m2"}, {})
    assert loaded.config.data.prompt_data == tmp_path / "rows.jsonl"
    assert loaded.config.model.hf_checkpoint == elsewhere / "m2"
    assert loaded.config.run.runs_dir == elsewhere / "runs"


def test_path_links_are_kept(preset: Path, tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    loaded = load_config(str(preset), {"agent_server.agent_python": str(link)}, {})
    assert loaded.config.agent_server.agent_python == link


def test_text_values(preset: Path) -> None:
    flags = {
        "engine-urls": "http://a:1, http://b:2",
        "shuffle": "false",
        "max-concurrent-trials": "none",
        "router-external-host": "10.0.0.1",
    }
    config = load_config(str(preset), flags, {}).config
    assert config.engine.engine_urls == ["http://a:1", "http://b:2"]
    assert config.data.shuffle is False
    assert config.rollout.max_concurrent_trials is None
    assert config.sessions.session_server_external_host == "10.0.0.1"
    env = {"MILES_ENGINE__ENGINE_URLS": '["http://c:3"]'}
    assert load_config(str(preset), {}, env).config.engine.engine_urls == ["http://c:3"]


def test_preset_from_environment(preset: Path) -> None:
    assert load_config(None, {}, {"MILES_PRESET": str(preset)}).config.preset == "mine"


@pytest.mark.parametrize(
    ("old", "new", "place", "meant"),
    [
        ("num_rollout = 2", "num_rolout = 2", "rollout.num_rolout", "rollout.num_rollout"),
        ("[rollout]", "lr = 1.0\n[rollout]", "model.lr", "training.lr"),
        ("[agent_server]", "[agent_sever]", "[agent_sever]", "agent_server"),
    ],
)
def test_unknown_preset_key(preset: Path, old: str, new: str, place: str, meant: str) -> None:
    preset.write_text(MINIMAL.replace(old, new))
    with pytest.raises(ConfigError) as error:
        load_config(str(preset), {}, {})
    assert f"mine.toml: {place}: unknown" in error.value.message
    assert f"did you mean {meant}?" in error.value.message
    assert "miles config keys" in error.value.fix


@pytest.mark.parametrize("name", ["MILES_NUM_ROLLOUT", "MILES_ROLLOUT_NUM_ROLLOUT"])
def test_environment_without_its_section_is_reported(preset: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(str(preset), {}, {name: "3"})
    assert f"{name}: unknown key; did you mean MILES_ROLLOUT__NUM_ROLLOUT?" in error.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MILES_BOGUS", None),
        ("MILES_PRESETT", "MILES_PRESET"),
        ("miles_preset", "MILES_PRESET"),
        ("MILES_NUM_ROLOUT", "MILES_ROLLOUT__NUM_ROLLOUT"),
        ("MILES_ROLLOUT__", None),
    ],
)
def test_no_variable_of_ours_is_ignored(preset: Path, name: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(str(preset), {}, {name: "3"})
    assert f"environment: {name}: unknown key" in error.value.message
    if meant:
        assert f"did you mean {meant}?" in error.value.message


def test_unknown_environment_and_flag_are_reported_together(preset: Path) -> None:
    env = {"MILES_ROLOUT__NUM_ROLLOUT": "3", "MILES_SESSION_TOKEN": "secret", "HOME": "/"}
    with pytest.raises(ConfigError) as error:
        load_config(str(preset), {"num-rolout": "3"}, env)
    lines = error.value.message.splitlines()
    assert len(lines) == 2
    assert "--num-rolout: unknown flag; did you mean --num-rollout?" in lines[0]
    assert "did you mean MILES_ROLLOUT__NUM_ROLLOUT?" in lines[1]


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("num-rollout", "0", "rollout.num_rollout: must be >= 1, is 0"),
        ("temperature", "warm", "rollout.temperature: must be a number, is 'warm'"),
        ("seed", "1.5", "run.seed: must be an integer, is '1.5'"),
        ("shuffle", "maybe", "data.shuffle: must be true or false, is 'maybe'"),
        ("kl-loss-type", "k9", "training.kl_loss_type: must be one of k1, k2, k3, low_var_kl"),
        ("run-name", "../x", "run.run_name: must match"),
        ("adam-beta1", "1", "training.adam_beta1: must be < 1, is 1"),
        ("agent-timeout", "9000", "agent_server.agent_trial_timeout: 7200 s must be above"),
    ],
)
def test_wrong_values(preset: Path, flag: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(str(preset), {flag: value}, {})
    assert problem in error.value.message
    assert "pydantic" not in str(error.value)


NUMBERS = [key for key in all_keys().values() if {int, float} & set(key.types)]


@pytest.mark.parametrize("key", NUMBERS, ids=lambda key: key.name)
def test_a_number_that_no_file_can_hold_is_refused(preset: Path, key: Key) -> None:
    """What is accepted comes back from the run's config.json."""
    for text in ("inf", "nan", "-inf", "9" * 25, "-" + "9" * 25):
        try:
            config = load_config(str(preset), {key.dotted: text}, {}).config
        except ConfigError as error:
            assert f"{key.section}." in error.message
        else:
            assert MilesConfig.model_validate_json(dumps(config.model_dump())) == config


def test_wrong_value_names_the_preset(preset: Path) -> None:
    preset.write_text(MINIMAL.replace("num_rollout = 2", "num_rollout = 0"))
    with pytest.raises(ConfigError, match=r"mine.toml: rollout.num_rollout: must be >= 1, is 0"):
        load_config(str(preset), {}, {})


def test_missing_values_name_what_to_set() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {}, {})
    assert "rollout.num_rollout: is required; set --num-rollout" in error.value.message
    assert "--preset" in error.value.fix


def test_unknown_preset_and_broken_toml(preset: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        load_config("quikstart", {}, {})
    with pytest.raises(ConfigError, match="no such file"):
        load_config("nowhere/x.toml", {}, {})
    preset.write_text("[data\n")
    with pytest.raises(ConfigError, match="not valid TOML.*line 1"):
        load_config(str(preset), {}, {})


def test_names_are_unique_and_described() -> None:
    names = [key.name for key in all_keys().values()]
    assert len(names) == len(set(names))
    assert all(key.field.description for key in all_keys().values())
    assert set(sections()) == set(MilesConfig.model_fields) - {"preset"}
    for key in all_keys().values():
        assert {find_key(flag) for flag in key.flags} == {key}


def test_no_secret_is_a_field() -> None:
    words = ("secret", "password", "api_key", "token")
    allowed = {"max_tokens_per_gpu"}
    names = {key.name for key in all_keys().values()} - allowed
    assert not [name for name in names if any(word in name for word in words)]


def test_import_is_light() -> None:
    code = (
        "import sys, miles_core.config.load, miles_core.config.flags\n"
        "heavy = {'torch', 'ray', 'prefect', 'pyarrow', 'datasets', 'numpy', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
