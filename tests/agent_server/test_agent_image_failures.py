"""What is said of an image that cannot be made, and of a sandbox that does not start."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_server_helpers import TOML, Server, assert_no_verdict, make_task  # noqa: E402

from miles_core.agent_server.sandbox import dockerfile  # noqa: E402
from miles_core.agent_server.sandbox.box import Box, BoxSettings  # noqa: E402
from miles_core.agent_server.sandbox.build import HostBuild, Workplace, platform  # noqa: E402
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits  # noqa: E402
from miles_core.agent_server.sandbox.context import Context  # noqa: E402
from miles_core.agent_server.sandbox.errors import OutOfMemory  # noqa: E402
from miles_core.agent_server.sandbox.forks import Helpers  # noqa: E402
from miles_core.agent_server.sandbox.images import open_images  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

ADVICE = "start the agent server with --images buildah"
OFFLINE = "a sandbox without a network"
FAILED, UNSUPPORTED = Cause.SANDBOX_FAILED, Cause.SANDBOX_UNSUPPORTED


def made(tasks: Path, **fields: str) -> str:
    name = f"fails-{uuid.uuid4().hex[:8]}"
    make_task(tasks, name, **fields)
    return name


@pytest.mark.parametrize(
    ("line", "cause", "words", "offline"),
    [
        ("RUN false", UNSUPPORTED, f"line 2: RUN false: failed with 1; {ADVICE}", False),
        (
            "RUN echo no such thing >&2; exit 4",
            UNSUPPORTED,
            r"failed with 4 \(no such thing\)",
            False,
        ),
        ("RUN no-program-of-this-name", UNSUPPORTED, "failed with 127", False),
        ("RUN echo 'connect: Network is unreachable'; exit 1", UNSUPPORTED, "with 1", True),
        ("RUN getent hosts files.example.org", UNSUPPORTED, "looks for files.example.org", True),
        ("RUN getent hosts files.example.org || true", UNSUPPORTED, "looks for files", True),
        (
            "RUN kill -9 $$",
            FAILED,
            "line 2: RUN kill .* killed; a RUN has 4096 MB of memory",
            False,
        ),
        ('RUN ["sh", "-c", "kill -9 $$"]', FAILED, "of memory", False),
    ],
)
def test_why_a_run_failed(
    server: Server, tasks: Path, line: str, cause: Cause, words: str, offline: bool
) -> None:
    result = server.run(made(tasks, dockerfile=f"FROM debian\n{line}\n"), "nop")
    assert_no_verdict(result, cause, words)
    assert (OFFLINE in result.verdict.detail) == offline, result.verdict
    assert (ADVICE in result.verdict.detail) == (cause is UNSUPPORTED), result.verdict


def test_memory_that_a_part_of_a_run_lacked_is_named(tmp_path: Path) -> None:
    """Its own exit status need not tell, as that of a compiler or of make does not."""
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN tail /dev/zero; exit 2\n")
    context = Context(tmp_path)
    assert context.dockerfile is not None
    file = dockerfile.read(context.dockerfile, platform())
    tree, helpers = CgroupTree(), Helpers()
    if not tree.limits["memory"].startswith("cgroup"):
        pytest.skip(tree.limits["memory"])
    base = open_images(tmp_path / "trials", "host", 10**9).base
    box = Box("lacks", BoxSettings(base, 64, Limits(48, 512, None)), tree, helpers)

    async def follow() -> None:
        async def none() -> Workplace:
            raise AssertionError("there is one stage")

        try:
            await box.start()
            await HostBuild(file, context, none).follow(Workplace(box, list))
        finally:
            await box.close()
            helpers.close()

    try:
        with pytest.raises(OutOfMemory, match=r"line 2.*failed with 2.*killed.*48 MB of memory"):
            asyncio.run(follow())
    finally:
        tree.close()


def limited(memory_mb: int) -> str:
    text = TOML.replace("memory_mb = 512", f"memory_mb = {memory_mb}")
    assert text != TOML
    return text


@pytest.mark.parametrize("memory_mb", [1, 5])
def test_memory_in_which_nothing_starts(server: Server, tasks: Path, memory_mb: int) -> None:
    result = server.run(made(tasks, toml=limited(memory_mb)), "nop")
    assert_no_verdict(result, Cause.TASK_INVALID, f"memory_mb = {memory_mb}: .* less than 6 MB")


def test_memory_in_which_a_task_just_fits(server: Server, tasks: Path) -> None:
    assert server.run(made(tasks, toml=limited(32))).reward == 1.0


@pytest.mark.parametrize("gone", ["/usr/bin", "/bin/sh /usr/bin/dash", "/lib64 /usr/lib64"])
def test_an_image_without_what_commands_need(server: Server, tasks: Path, gone: str) -> None:
    name = made(tasks, dockerfile=f"FROM debian\nRUN rm -rf {gone}\n")
    assert_no_verdict(server.run(name, "nop"), FAILED, "its /bin/sh was not started")
