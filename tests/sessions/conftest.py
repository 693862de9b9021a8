"""Fixtures of the session tests: a tokenizer, a scripted engine, a real session server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from client_engine import StepEngine, step_engine
from client_truth import make_byte_tokenizer
from session_helpers import ScriptedEngine, make_tokenizer, serving, session_server

from miles_core.sessions.families import ChatFamily, load_family


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def family(tokenizer_dir: Path) -> ChatFamily:
    return load_family(tokenizer_dir)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with serving(engine):
        yield engine


@pytest.fixture(scope="module")
def server_url(
    tokenizer_dir: Path, engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with session_server(tokenizer_dir, engine.url, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def steps() -> Iterator[StepEngine]:
    """An engine that answers each prompt as a test's script says."""
    with step_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def url(steps: StepEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A session server over `steps` whose tokens are the bytes of a text."""
    scratch = tmp_path_factory.mktemp("clients")
    with session_server(make_byte_tokenizer(scratch / "model"), steps.url, scratch) as url:
        yield url
