"""Flags made from the schema, and `miles config`."""

from __future__ import annotations

import json

import pytest

from miles_cli.cli import Parser, UsageError
from miles_cli.config import register
from miles_core.config.flags import add_config_flags, config_flags
from miles_core.config.keys import all_keys


def _cli() -> Parser:
    parser = Parser(prog="miles")
    register(parser.add_subparsers(required=True))
    return parser


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="miles train")
    add_config_flags(parser)
    return parser


def test_flat_dotted_and_old_names(parser: Parser) -> None:
    args = parser.parse_args(
        ["--num-rollout", "3", "--training.lr", "1e-3", "--router-external-host", "h"]
    )
    assert config_flags(args) == {
        "rollout.num_rollout": "3",
        "training.lr": "1e-3",
        "sessions.session_server_external_host": "h",
    }


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--use-tis"], "true"),
        (["--use-tis", "false"], "false"),
        (["--no-use-tis"], "false"),
        (["--training.use-tis=true"], "true"),
    ],
)
def test_switches(parser: Parser, words: list[str], value: str) -> None:
    assert config_flags(parser.parse_args(words)) == {"training.use_tis": value}


def test_nothing_given_is_nothing_set(parser: Parser) -> None:
    assert config_flags(parser.parse_args([])) == {}


def test_help_has_every_key(parser: Parser) -> None:
    text = parser.format_help()
    for key in all_keys().values():
        assert f"{key.flag} " in text
    assert "None" not in text


@pytest.mark.parametrize(
    "words", [["--num-rolout", "3"], ["--num-rollou", "3"], ["--num-rolout=3"]]
)
def test_unknown_flag_names_the_nearest(parser: Parser, words: list[str]) -> None:
    with pytest.raises(UsageError, match="Did you mean --num-rollout?"):
        parser.parse(words)


def test_config_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = _cli().parse_args(["config", "show", "--preset", "quickstart", "--seed", "7", "--json"])
    assert args.run(args) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["preset"] == "quickstart"
    assert shown["values"]["run.seed"] == {"value": 7, "origin": "flag --seed"}
    assert shown["values"]["rollout.num_rollout"]["origin"] == "presets/quickstart.toml"
    assert set(shown["values"]) == set(all_keys())


def test_config_show_table_has_whole_values(capsys: pytest.CaptureFixture[str]) -> None:
    args = _cli().parse_args(["config", "show", "--preset", "quickstart"])
    assert args.run(args) == 0
    text = capsys.readouterr().out
    assert "examples/rows/train.jsonl" in text
    assert all(dotted in text for dotted in all_keys())


def test_config_keys(capsys: pytest.CaptureFixture[str]) -> None:
    args = _cli().parse_args(["config", "keys", "--json"])
    assert args.run(args) == 0
    keys = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert keys["rollout.num_rollout"]["required"] is True
    assert keys["training.kl_loss_type"]["type"] == "k1|k2|k3|low_var_kl"
    assert keys["rollout.num_rollout"]["environment"] == "MILES_ROLLOUT__NUM_ROLLOUT"
    args = _cli().parse_args(["config", "keys"])
    assert args.run(args) == 0
    assert "--max-tokens-per-gpu" in capsys.readouterr().out
