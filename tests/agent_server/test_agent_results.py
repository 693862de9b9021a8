"""A result that is there is not lost: on a full disk, or when a trial is cancelled at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
from miles_core.agent_server import hiding, trials, trials_dir  # noqa: E402
from miles_core.agent_server.protocol import (  # noqa: E402
    AgentMetrics,
    Phase,
    TrialRequest,
    TrialResult,
)
from miles_core.agent_server.trials import TrialManager  # noqa: E402
from miles_core.verdicts import Verdict  # noqa: E402

pytestmark = [pytest.mark.agent_env, pytest.mark.asyncio]

SESSION = "0123456789abcdef-session"
URL = f"http://127.0.0.1:1/sessions/{SESSION}/v1"


class GradedRunner:
    """Ends every trial with reward 1 at once, after it has left a file."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def run(
        self, trial_id: str, request: TrialRequest, enter: Callable[[Phase], None]
    ) -> TrialResult:
        place = self._root / trial_id / "harbor"
        place.mkdir()
        (place / "log").write_text(f"asked {request.base_url} twice: {request.base_url}")
        verdict = Verdict.graded(1.0, {"reward": 1.0})
        return TrialResult.of(trial_id, verdict, AgentMetrics(turns=1), f"by {request.base_url}")


def opened(root: Path) -> TrialManager:
    manager = TrialManager(GradedRunner(root), root, 2)  # type: ignore[arg-type]
    manager.open()
    return manager


REQUEST = TrialRequest(instance_id="t", base_url=URL)


async def test_a_result_waits_in_memory_until_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = True

    def write(path: Path, data: bytes) -> None:
        if full and path.name == "result.json":
            raise OSError(28, "No space left on device")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)

    monkeypatch.setattr(trials_dir, "write_file", write)
    manager = opened(tmp_path)
    manager.start("one", REQUEST)
    status = await manager.wait("one", 10.0)
    assert status.state == "ended" and status.result is not None and status.result.reward == 1.0
    assert manager.start("one", REQUEST).result == status.result  # it is not run again
    assert capsys.readouterr().err.count("No space left") == 1
    full = False
    await asyncio.sleep(2 * trials.LEASE_CHECK_S)
    kept = TrialResult.model_validate_json((tmp_path / "one" / "result.json").read_bytes())
    assert kept == status.result == manager.status("one").result
    await manager.close()


async def test_a_cancel_after_the_verdict_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiding_now, go_on = threading.Event(), threading.Event()

    def slowly(directory: Path, secrets: list[str]) -> None:
        hiding_now.set()
        assert go_on.wait(10)
        hiding.hide(directory, secrets)

    monkeypatch.setattr(trials, "hide", slowly)
    manager = opened(tmp_path)
    manager.start("one", REQUEST)
    await asyncio.to_thread(hiding_now.wait, 10)
    before = manager.status("one")
    assert (before.state, before.result) == ("running", None)
    cancelled = await manager.cancel("one")
    go_on.set()
    assert cancelled.result is not None and cancelled.result.reward == 1.0
    await manager.close()


async def test_secrets_are_stars_in_files_and_results(tmp_path: Path) -> None:
    manager = opened(tmp_path)
    manager.start("one", REQUEST)
    result = (await manager.wait("one", 10.0)).result
    stars = URL.replace(SESSION, "*" * len(SESSION))
    assert result is not None and result.exit_status == f"by {stars}"
    assert (tmp_path / "one/harbor/log").read_text() == f"asked {stars} twice: {stars}"
    await manager.close()


async def test_only_regular_files_below_are_written(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "trial"
    outside.write_text(SESSION)
    (inside / "deep").mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "up").symlink_to(tmp_path)
    long = b"x" * (hiding.CHUNK - 5) + SESSION.encode() + b"y" * hiding.CHUNK + SESSION.encode()
    (inside / "deep" / "long").write_bytes(long)
    hiding.hide(inside, [SESSION])
    hiding.hide(tmp_path / "absent", [SESSION])
    assert outside.read_text() == SESSION
    stars = b"*" * len(SESSION)
    assert (inside / "deep" / "long").read_bytes() == long.replace(SESSION.encode(), stars)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"base_url": URL}, {SESSION}),
        ({"base_url": "http://h:1/v1"}, set()),
        ({"base_url": f"http://u:{SESSION}@h/v1?key={SESSION}"}, {SESSION, f"key={SESSION}"}),
        ({"api_key": SESSION, "note": "n" * 30, "password": "short"}, {SESSION}),
    ],
)
async def test_what_is_secret_in_a_request(fields: dict[str, Any], found: set[str]) -> None:
    assert set(hiding.secrets_of(TrialRequest(instance_id="t", **fields))) == found
