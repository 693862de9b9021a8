"""Child processes with ready files."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from miles_core.cluster.services import Service, ServiceError
from miles_core.errors import UserError
from miles_core.serving import EXIT_BUSY, EXIT_USAGE

SERVER = """
import argparse, json, os, pathlib, sys, time
p = argparse.ArgumentParser()
p.add_argument("--ready-file"); p.add_argument("--parent-pid"); p.add_argument("--fail")
p.add_argument("--code", type=int, default=3)
a = p.parse_args()
if a.fail:
    print(a.fail); sys.exit(a.code)
pathlib.Path(a.ready_file).write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid()}))
time.sleep(60)
"""


def service(tmp_path: Path, monkeypatch, *argv: str) -> Service:
    (tmp_path / "quiet_service.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Service("quiet", ["quiet_service", *argv], tmp_path / "services")


async def test_a_service_is_ready_when_it_says_so_and_gone_after_stop(tmp_path, monkeypatch):
    one = service(tmp_path, monkeypatch)
    one.start()
    assert await one.wait_ready(20) == "http://127.0.0.1:1"
    one.check()
    one.stop()
    assert one.process is not None and one.process.returncode is not None
    with pytest.raises(ServiceError, match="signal 15"):
        one.check()


async def test_a_service_that_ends_at_start_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    one = service(tmp_path, monkeypatch, "--fail", "no such model")
    one.start()
    began = time.monotonic()
    with pytest.raises(ServiceError, match="exit status 3.*no such model"):
        await one.wait_ready(60)
    assert time.monotonic() - began < 50


async def test_what_a_person_must_change_is_not_tried_again(tmp_path, monkeypatch):
    """The driver ends its run on a UserError; a port in use may be free at another try."""
    one = service(tmp_path, monkeypatch, "--fail", "no model", "--code", str(EXIT_USAGE))
    one.start()
    with pytest.raises(UserError, match="no model"):
        await one.wait_ready(60)
    other = service(tmp_path, monkeypatch, "--fail", "in use", "--code", str(EXIT_BUSY))
    other.start()
    with pytest.raises(ServiceError, match="in use"):
        await other.wait_ready(60)


async def test_an_old_ready_file_is_not_taken_for_the_new_process(tmp_path, monkeypatch):
    one = service(tmp_path, monkeypatch, "--fail", "broken")
    one.directory.mkdir(parents=True)
    one.ready_file.write_text('{"url": "http://127.0.0.1:9"}')
    one.start()
    with pytest.raises(ServiceError):
        await one.wait_ready(20)


def test_python_of_this_environment_runs_the_service(tmp_path, monkeypatch):
    one = service(tmp_path, monkeypatch)
    one.start()
    try:
        assert one.process is not None and one.process.args[0] == sys.executable
    finally:
        one.stop()
