"""A tokenizer and the patterns of the example tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.modelinit.demos import DemoMaker, Prompts, fixed_words, read_patterns, words_of
from miles_core.modelinit.tokenizer import write_tokenizer
from miles_core.sessions.families import load_family
from miles_core.sessions.families.terse import TEMPLATE

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def prompts():
    return Prompts.load(EXAMPLES / "agents" / "terse.yaml")


@pytest.fixture(scope="session")
def patterns():
    return read_patterns(EXAMPLES / "tasks")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory, patterns, prompts):
    directory = tmp_path_factory.mktemp("tokenizer")
    words = fixed_words(patterns[0]) + words_of(prompts.system)
    write_tokenizer(directory, words, TEMPLATE.read_text())
    return directory


@pytest.fixture(scope="session")
def family(tokenizer_dir):
    return load_family(tokenizer_dir)


@pytest.fixture
def maker(family, prompts, patterns):
    return DemoMaker(family, prompts, *patterns, seed=3)
