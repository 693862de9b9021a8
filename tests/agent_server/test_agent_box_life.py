"""Sandboxes that are given up at any moment of their life leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from miles_core.agent_server.sandbox.box import Box, BoxSettings  # noqa: E402
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits  # noqa: E402
from miles_core.agent_server.sandbox.forks import Helpers  # noqa: E402
from miles_core.agent_server.sandbox.images import Images, open_images  # noqa: E402
from miles_core.agent_server.sandbox.processes import descendants  # noqa: E402
from miles_core.agent_server.sandbox.system import agent_binds  # noqa: E402

pytestmark = pytest.mark.agent_env

SANDBOXES, AT_ONCE = 24, 6
LONGEST_S = 0.4
"""About the time in which one is made and used on an idle machine."""


def used() -> tuple[int, int]:
    """Open files of this process, and the processes below it."""
    return len(os.listdir("/proc/self/fd")), len(descendants(os.getpid()))


async def use(box: Box) -> None:
    await box.start()
    await box.run(["sh", "-c", "(setsid sleep 300 &); sleep 0.02"])
    await box.seclude({"/logs/verifier": 0o777, "/tests": 0o755}, ("/logs",), {})
    await box.run(["sleep", "300"], timeout_s=0.05)


async def live(box: Box, seconds: float) -> None:
    """Use a sandbox for so long, or as long as it takes, and close it."""
    using = asyncio.create_task(use(box))
    await asyncio.wait({using}, timeout=seconds)
    using.cancel()
    await asyncio.wait({using})
    await box.close()
    if not using.cancelled():
        using.result()


async def give_up(tree: CgroupTree, images: Images) -> None:
    helpers, chance = Helpers(), random.Random(11)
    settings = BoxSettings(images.base, 64, Limits(512, 512, None), agent_binds())
    boxes = iter([Box(f"b{number}", settings, tree, helpers) for number in range(SANDBOXES + 1)])
    try:
        await live(next(boxes), 60)
        before = used()
        for _ in range(SANDBOXES // AT_ONCE):
            times = [chance.uniform(0, LONGEST_S) for _ in range(AT_ONCE)]
            await asyncio.gather(*(live(next(boxes), seconds) for seconds in times))
        for _ in range(100):
            if used() == before:
                break
            await asyncio.sleep(0.1)
        assert used() == before
    finally:
        helpers.close()


def test_sandboxes_that_are_given_up_leave_nothing(tmp_path: Path) -> None:
    tree = CgroupTree()
    try:
        asyncio.run(give_up(tree, open_images(tmp_path, "host", 10**9)))
        left = Path("/sys/fs/cgroup").glob(f"**/miles-agent-{os.getpid()}-*/b*")
        assert not list(left)
    finally:
        tree.close()
