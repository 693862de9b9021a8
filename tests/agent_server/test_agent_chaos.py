"""Many trials while sandboxes, verifiers, agents and the server itself fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_server_helpers import SECRET, SOLVE, Server, make_task  # noqa: E402

from miles_core.agent_server.client import AgentServerClient  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest, TrialResult  # noqa: E402
from miles_core.agent_server.sandbox.processes import descendants  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = [pytest.mark.agent_env, pytest.mark.slow]

TRIALS, AT_ONCE = 200, 8
CGROUPS = Path("/sys/fs/cgroup")
HALF = "#!/bin/bash\necho 0.5 > /logs/verifier/reward.txt\n"
CRASH = "#!/bin/bash\necho broken >&2\nexit 3\n"

KINDS = {  # kind -> (share, graded reward or None, causes of what has no grade)
    "boot": (0.25, None, {Cause.SANDBOX_FAILED}),
    "crash": (0.10, None, {Cause.REWARD_MISSING}),
    "hang": (0.05, 0.0, set()),
    "half": (0.20, 0.5, set()),
    "good": (0.40, 1.0, set()),
}


def make_tasks(root: Path) -> None:
    make_task(root, "good-1")
    make_task(root, "half-1", test=HALF)
    make_task(root, "crash-1", test=CRASH)
    make_task(root, "boot-1")
    hang = "#!/bin/bash\n(setsid sleep 986 &)\nsleep 986\n"
    make_task(root, "hang-1", solve=hang + SOLVE.partition("\n")[2], agent_s=3)


def schedule() -> list[str]:
    kinds = [kind for kind, (share, _, _) in KINDS.items() for _ in range(int(share * TRIALS))]
    random.Random(7).shuffle(kinds)
    return kinds


def left(server_pid: int, root: Path) -> list[str]:
    """Processes, mounts, cgroups and directories that a sandbox could have left."""
    found = [str(path) for path in CGROUPS.glob(f"**/miles-agent-{server_pid}-*")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(root) in line]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "sleep 986" in command or str(root) in command:
            found.append(command)
    return found


async def drive(server: Server, kinds: list[str]) -> dict[str, TrialResult]:
    """Run all trials; kill the server after a third and after two thirds of them."""
    results: dict[str, TrialResult] = {}
    slots = asyncio.Semaphore(AT_ONCE)
    kills = [TRIALS // 3, 2 * TRIALS // 3]

    async with AgentServerClient(server.url, SECRET) as client:

        async def one(number: int, kind: str) -> None:
            async with slots:
                request = TrialRequest(instance_id=f"{kind}-1", agent_name="oracle")
                results[f"t{number}-{kind}"] = await client.run(f"t{number}-{kind}", request, 300)

        async def restart() -> None:
            for limit in kills:
                while len(results) < limit:  # noqa: ASYNC110 (results are no event)
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(server.stop, signal.SIGKILL)
                await asyncio.to_thread(server.start, server.port)

        await asyncio.gather(restart(), *(one(n, kind) for n, kind in enumerate(kinds)))
    return results


def test_every_trial_ends_in_one_true_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tasks(tmp_path / "tasks")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    server = Server(
        tmp_path,
        tmp_path / "tasks",
        *["--max-concurrent", str(AT_ONCE), "--sandbox", "flaky_environment:Flaky"],
    )
    try:
        results = asyncio.run(drive(server, schedule()))
    finally:
        pid = server.pid
        server.stop()
    assert len(results) == TRIALS
    restarted = 0
    for name, result in results.items():
        verdict = result.verdict
        _, reward, causes = KINDS[name.partition("-")[2]]
        if verdict.cause is Cause.SERVER_RESTARTED:
            restarted += 1
            assert verdict.kind is VerdictKind.NO_VERDICT and result.reward is None
        elif reward is None:
            assert (verdict.kind, result.reward) == (VerdictKind.NO_VERDICT, None), (name, verdict)
            assert verdict.cause in causes, (name, verdict)
        else:
            assert (verdict.kind, result.reward) == (VerdictKind.GRADED, reward), (name, verdict)
    print(Counter(str(r.verdict.cause or r.verdict.kind) for r in results.values()))
    assert 1 <= restarted <= 2 * AT_ONCE
    assert left(pid, tmp_path) == []


def test_many_trials_leave_memory_files_and_disk_as_they_were(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "good-1")
    flags = ["--max-concurrent", "4", "--keep-trials", "50"]
    server = Server(tmp_path, tmp_path / "tasks", *flags)

    async def run(count: int, mark: str) -> None:
        slots = asyncio.Semaphore(4)
        async with AgentServerClient(server.url, SECRET) as client:

            async def one(number: int) -> None:
                async with slots:
                    request = TrialRequest(instance_id="good-1", agent_name="oracle")
                    result = await client.run(f"{mark}-{number}", request, 120)
                    assert result.reward == 1.0, result.verdict

            await asyncio.gather(*(one(number) for number in range(count)))

    def used() -> tuple[int, int, int]:
        """MiB and open files of the server and its helpers, entries under its trials directory
        when it has removed what is too much."""
        end = time.monotonic() + 120
        while len(list(server.trials.glob("*/result.json"))) > 50 or list(
            server.trials.glob(".removed-*")
        ):
            assert time.monotonic() < end, "ended trials are not removed"
            time.sleep(0.5)
        memory = files = 0
        for pid in (server.pid, *descendants(server.pid)):
            status = Path(f"/proc/{pid}/status").read_text()
            memory += int(status.partition("VmRSS:")[2].split()[0]) >> 10
            files += len(os.listdir(f"/proc/{pid}/fd"))
        return memory, files, sum(1 for _ in server.trials.rglob("*"))

    try:
        asyncio.run(run(100, "warm"))
        before = used()
        asyncio.run(run(400, "more"))
        after = used()
    finally:
        server.stop()
    print(before, after)
    assert after[0] - before[0] < 30
    assert after[1] - before[1] < 10
    assert after[2] - before[2] < 60
