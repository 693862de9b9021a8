"""Sessions leave memory, outlive their server, expire, and end with their files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from session_helpers import TOKEN, Agent, ScriptedEngine, server_command, session_server, until
from test_session_server import CALL, DONE, OBSERVED, USER, check_exact

from miles_core.sessions.families import ChatFamily
from miles_core.sessions.journal import Journal
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.protocol import SessionRequest
from miles_core.sessions.session import session_key
from miles_core.sessions.tree import Turn


def health(http: httpx.Client, url: str) -> dict[str, object]:
    return http.get(f"{url}/health").json()


def test_an_idle_session_leaves_memory_and_comes_back(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    with session_server(tokenizer_dir, engine.url, tmp_path, "--spill-after", "0.5") as url:
        agent = Agent(url, http)
        engine.script = [family.render_output(m) for m in (CALL, DONE, DONE)]
        first = agent.message([USER])
        until(lambda: health(http, url)["spilled"] == 1)
        second = agent.message([USER, first, OBSERVED])
        assert health(http, url)["spilled"] == 0
        until(lambda: health(http, url)["spilled"] == 1)
        # Requests that come together share one reading of the file.
        found: list[dict[str, object]] = []
        threads = [threading.Thread(target=lambda: found.append(agent.samples())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found == [found[0]] * 4
        agent.message([USER, first, OBSERVED, second, USER])
        samples = agent.samples()
        check_exact(samples, engine)
        assert [len(s["turns"]) for s in samples["samples"]] == [3]


def test_a_running_call_keeps_its_session_in_memory(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    more = ("--spill-after", "0.2", "--session-timeout", "1.0")
    with session_server(tokenizer_dir, engine.url, tmp_path, *more) as url:
        agent = Agent(url, http)
        engine.script, engine.delay_s = [family.render_output(DONE)], 4.0
        agent.message([USER])
        engine.delay_s = 0.02
        assert agent.samples()["model_calls"] == 1


def test_an_unused_session_ends(
    tokenizer_dir: Path, engine: ScriptedEngine, http: httpx.Client, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    more = ("--session-timeout", "1", "--spill-dir", str(kept))
    with session_server(tokenizer_dir, engine.url, tmp_path, *more) as url:
        agent = Agent(url, http)
        assert len(list(kept.glob("*.session"))) == 1
        until(lambda: health(http, url)["sessions"] == 0)
        assert agent.ask([USER]).status_code == 404
        assert agent.ask([USER]).json()["error"]["code"] == "session_not_found"
        assert list(kept.glob("*.session")) == []


@contextlib.contextmanager
def killable(
    tokenizer: Path, engine_url: str, scratch: Path, port: int
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    ready = scratch / f"ready-{time.monotonic_ns()}.json"
    more = ["--ready-file", str(ready), "--spill-dir", str(scratch / "kept"), "--port", str(port)]
    process = subprocess.Popen(
        server_command(tokenizer, engine_url, *more),
        env={**os.environ, "MILES_SESSION_TOKEN": TOKEN},
    )
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None
        yield json.loads(ready.read_text())["url"], process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)


def test_a_server_that_dies_loses_no_turn_and_its_sessions_can_only_be_read(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    with killable(tokenizer_dir, engine.url, tmp_path, 0) as (url, process):
        done, live, refused, unused = (Agent(url, http) for _ in range(4))
        engine.script = [family.render_output(m) for m in (CALL, DONE, CALL)]
        first = done.message([USER])
        done.message([USER, first, OBSERVED])
        answer = live.message([USER])
        engine.script = [500]
        assert refused.ask([USER]).status_code == 502
        before = [agent.samples() for agent in (done, live, refused, unused)]
        engine.script = ["hang"]
        asked = len(engine.requests)
        running = threading.Thread(target=lambda: _ignore(live, answer))
        running.start()
        until(lambda: len(engine.requests) > asked)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        running.join(20)
    names = [path.name for path in (tmp_path / "kept").glob("*.session")]
    assert len(names) == 4 and not any(done.id in name for name in names)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "kept").iterdir())
    port = int(url.rpartition(":")[2])
    with killable(tokenizer_dir, engine.url, tmp_path, port) as (again, _):
        assert again == url and health(http, url)["sessions"] == 4
        assert [agent.samples() for agent in (done, live, refused, unused)] == before
        check_exact(done.samples(), engine)
        response = live.ask([USER, answer, OBSERVED])
        assert response.status_code == 410
        assert response.json()["error"]["code"] == "session_lost"
        assert live.samples()["end_reason"] == "session_failed"
        assert live.samples()["samples"] == before[1]["samples"]
        assert [agent.delete() for agent in (done, live, refused, unused)] == [204] * 4
        assert list((tmp_path / "kept").glob("*.session")) == []


def _ignore(agent: Agent, answer: dict[str, object]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        agent.ask([USER, answer, OBSERVED])


def turn(index: int, parent: Turn | None, text: str) -> Turn:
    call = ToolCall("bash", {"n": 10**30, "x": float("inf"), "s": "☃"}, "id0")
    ids = np.arange(index + 1, dtype=np.int32)
    return Turn(
        index=index,
        parent=parent,
        tools_key="k",
        new=(Message("user", text),),
        answer=Message("assistant", text, (call,), "why"),
        prompt_ids=ids,
        output_ids=ids,
        logprobs=ids / -3,
        length=(parent.length if parent else 0) + 2 * len(ids),
        rid=f"r{index}",
        versions=((3, 0, 1), (4, 1, 2)),
        finish_reason="stop",
        started=index,
        ended=index + 1,
    )


def make_journal(directory: Path) -> tuple[Journal, list[int]]:
    """A journal of three turns, and the length of its file after each."""
    journal = Journal(directory / f"{session_key('x')}.session")
    journal.create(SessionRequest(max_seq_len=9))
    lengths = [journal.path.stat().st_size]
    parent = None
    for index in range(3):
        made = turn(index, parent, f"text ☃ {index}")
        made.experts = journal.append(made, bytes(index))
        assert (made.experts is None) == (index == 0)
        parent = made
        lengths.append(journal.path.stat().st_size)
    return journal, lengths


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_journal_that_was_cut_off_gives_every_whole_turn(tmp_path: Path, damage: str) -> None:
    journal, lengths = make_journal(tmp_path)
    whole = journal.path.read_bytes()
    last = journal.read().tree.turns[-1]
    assert [t.rid for t in last.path()] == ["r0", "r1", "r2"]
    assert last.answer == turn(2, None, "text ☃ 2").answer
    assert last.versions == ((3, 0, 1), (4, 1, 2))
    assert last.ids().tolist() == [*[0] * 2, *[0, 1] * 2, *[0, 1, 2] * 2]
    assert last.experts is not None and journal.blob(last.experts) == bytes(2)
    for at in range(lengths[0], len(whole)):
        flipped = bytes([whole[at] ^ 1]) + whole[at + 1 :]
        journal.path.write_bytes(whole[:at] + (b"" if damage == "cut" else flipped))
        complete = sum(length <= at for length in lengths) - 1
        stored = journal.read()
        assert len(stored.tree.turns) == complete, at
        # What was cut off was answered to nobody; what is damaged may have been.
        assert stored.damaged == (stored.end_reason == "session_failed")
        assert not (damage == "cut" and stored.damaged)
    journal.path.write_bytes(whole[: lengths[0] - 1])
    with pytest.raises(ValueError, match="is no session"):
        journal.read()
    journal.path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    with pytest.raises(ValueError, match="is damaged"):
        journal.read()


def test_a_damaged_turn_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    journal, lengths = make_journal(tmp_path)
    whole = journal.path.read_bytes()
    at = lengths[1] + 30
    journal.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    stored = journal.read()
    assert len(stored.tree.turns) == 1
    assert stored.damaged and stored.end_reason == "session_failed"


def test_a_folder_has_one_server(
    tokenizer_dir: Path, engine: ScriptedEngine, http: httpx.Client, tmp_path: Path
) -> None:
    kept = ("--spill-dir", str(tmp_path / "kept"))
    with session_server(tokenizer_dir, engine.url, tmp_path, *kept) as url:
        agent = Agent(url, http)
        command = server_command(tokenizer_dir, engine.url, *kept)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "works in it" in done.stderr, done.stderr
        assert agent.samples()["samples"] == []
    with session_server(tokenizer_dir, engine.url, tmp_path, *kept) as url:
        assert health(http, url)["sessions"] == 1, "the end of the first one frees it"


def test_a_full_disk_refuses_the_call_and_leaves_the_journal_sound(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    with session_server(tokenizer_dir, engine.url, tmp_path, "--spill-dir", str(kept)) as url:
        agent = Agent(url, http)
        engine.script = [family.render_output(m) for m in (CALL, DONE)]
        first = agent.message([USER])
        (path,) = kept.glob("*.session")
        moved = path.rename(tmp_path / "moved")
        response = agent.ask([USER, first, OBSERVED])
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "disk_failed"
        moved.rename(path)
        samples = agent.samples()
        assert samples["model_calls"] == 1 and samples["end_reason"] == "session_failed"
