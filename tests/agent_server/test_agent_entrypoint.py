"""The ENTRYPOINT of an image: it is run when a trial's sandbox starts, as a container runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_image_helpers import SAY, said  # noqa: E402
from agent_server_helpers import CHECK, TOML, Server, assert_no_verdict, make_task  # noqa: E402

from miles_core.agent_server.sandbox import entrypoint  # noqa: E402
from miles_core.agent_server.sandbox.build import state_of  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

HEAD = "FROM debian:12-slim\nWORKDIR /app\n"
SCRIPT = "COPY --chmod=755 <<'END' /e.sh\n#!/bin/sh\n{}\nEND\n"
PREPARE = "sleep 0.3; echo 42 > answer.txt"


def make(tasks: Path, name: str, text: str, test: str = CHECK, **files: str) -> None:
    make_task(tasks, name, dockerfile=HEAD + text, test=test, **files)


# Each is to have made /app/answer.txt before the agent begins.
PREPARES = {
    "exec": SCRIPT.format(f'{PREPARE}; exec "$@"') + 'ENTRYPOINT ["/e.sh"]\n',
    "ends": SCRIPT.format(PREPARE) + 'ENTRYPOINT ["/e.sh"]\n',
    "shell": f"ENTRYPOINT {PREPARE}\n",
    "no-files": f'ENTRYPOINT ["sh", "-c", "{PREPARE}; exec \\"$0\\" \\"$@\\""]\n',
    "child": SCRIPT.format(f'{PREPARE}; "$@"') + 'CMD ["x"]\nENTRYPOINT ["/e.sh"]\nCMD ["y"]\n',
    "daemon": SCRIPT.format(f"({PREPARE}) & sleep 0.5") + 'ENTRYPOINT ["/e.sh"]\n',
    "sleeps": SCRIPT.format(f"{PREPARE}; sleep infinity") + 'ENTRYPOINT ["/e.sh"]\n',
    "stage": SCRIPT.format(f'{PREPARE}; exec "$@"')
    + 'ENTRYPOINT ["/e.sh"]\nFROM 0 AS b\nFROM debian\nENTRYPOINT ["false"]\nFROM b\n',
    "reset": f'RUN {PREPARE}\nENTRYPOINT ["/nowhere"]\nENTRYPOINT []\n',
    "a-shell": f'RUN {PREPARE}\nENTRYPOINT ["/bin/bash", "-l", "-c"]\n',
}


@pytest.mark.parametrize("kind", sorted(PREPARES))
def test_it_has_run_before_the_agent(server: Server, tasks: Path, kind: str) -> None:
    make(tasks, f"entry-{kind}", PREPARES[kind])
    result = server.run(f"entry-{kind}", "nop")
    assert result.reward == 1.0, result.verdict


SERVICE = r"""
(while :; do date >> /srv/beats; echo beat; sleep 0.05; done) &
yes | head -c 9000000
echo "$(id -un) $HOME $WHO $PWD $*" > /srv/told
shift
exec "$@"
"""
LOOK = r"""
cat /srv/told
ps -eo args | grep -c '^sleep infinit[y]'
before=$(wc -l < /srv/beats); sleep 0.5; [ $(wc -l < /srv/beats) -gt $((before + 3)) ] && echo beats
"""


@pytest.mark.parametrize("kept", [True, False], ids=["from the cache", "followed"])
def test_what_it_starts_lives_beside_agent_and_verifier(
    server: Server, tasks: Path, kept: bool
) -> None:
    """As the image's user, in its workdir; and the end of an agent that was out of time is none."""
    text = (
        "RUN useradd -m dev && mkdir /srv/x && chown -R dev /srv\n"
        + SCRIPT.format(SERVICE)
        + 'ENV WHO=world\nWORKDIR /srv/x\nUSER dev\nENTRYPOINT ["/e.sh", "word"]\n'
    )
    told = "dev /home/dev world /srv/x word sh -c sleep infinity"
    if not kept:
        words = ["bash", "-c", SERVICE.replace("/srv/", "/tmp/"), "x", "word"]
        text = f"ENV WHO=world\nENTRYPOINT {json.dumps(words)}\n"
        told = "root /root world /app word sh -c sleep infinity"
    name = f"entry-service-{kept}"
    look = LOOK if kept else LOOK.replace("/srv/", "/tmp/")
    solve, toml = (
        "#!/bin/bash\nsleep 60\n",
        TOML.replace("timeout_sec = {agent_s}", "timeout_sec = 1"),
    )
    assert toml != TOML
    make(tasks, name, text, SAY.format(look), toml=toml, solve=solve)
    for agent in ("nop", "oracle"):
        assert said(server, name, agent).splitlines() == [told, "1", "beats"]
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_e(path)]
    assert not left, "the service outlives its sandbox"


def _is_e(path: Path) -> bool:
    try:
        return b"word\0sh\0-c\0sleep infinity" in path.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'ENTRYPOINT ["/nowhere"]\n',
            "ENTRYPOINT /nowhere failed with 127 .*: /nowhere: not found",
        ),
        (SCRIPT.format("echo the disk is on fire >&2; exit 3") + "ENTRYPOINT /e.sh\n", "on fire"),
        (
            'ENTRYPOINT ["sleep", "infinity"]\n',
            "with the arguments sh -c .sleep infinity.: sleep: ",
        ),
        ('ENTRYPOINT ["sh", "-c", "kill -9 $$"]\n', "failed with 137 .*: .*memory_mb"),
        ('USER ghost\nENTRYPOINT ["true"]\n', "user 'ghost' does not exist"),
    ],
    ids=["absent", "failing", "arguments", "killed", "user"],
)
def test_one_that_fails_is_told(
    server: Server, tasks: Path, request: pytest.FixtureRequest, text: str, words: str
) -> None:
    name = f"entry-bad-{request.node.callspec.id}"
    make(tasks, name, text)
    assert_no_verdict(server.run(name, "nop"), Cause.SANDBOX_FAILED, words)


@pytest.mark.slow
def test_a_service_that_never_runs_its_arguments_is_waited_for_a_while(
    server: Server, tasks: Path
) -> None:
    script = "touch /app/started; while :; do sleep 0.1; done"
    text = SCRIPT.format(script) + 'ENTRYPOINT ["/e.sh"]\n'
    make(tasks, "entry-endless", text, SAY.format("ls /app; pgrep -fc '^/bin/sh /e.s[h]'"))
    assert said(server, "entry-endless").split() == ["started", "1"]


def test_which_entrypoints_are_run() -> None:
    for bare in ([], ["sh"], ["/bin/bash"], ["bash", "-l"], ["/bin/sh", "-c"], ["bash", "-lc"]):
        assert not entrypoint.is_run(bare), bare
    for real in (["/e.sh"], ["sh", "/e.sh"], ["/bin/sh", "-c", "x"], ["tini", "--"], ["-sh"]):
        assert entrypoint.is_run(real), real


def test_that_of_a_built_image() -> None:
    assert state_of({"Entrypoint": ["/e.sh", "x"], "Cmd": ["y"]}).entrypoint == ["/e.sh", "x"]
    assert state_of({"Entrypoint": None}).entrypoint == [] == state_of({}).entrypoint
