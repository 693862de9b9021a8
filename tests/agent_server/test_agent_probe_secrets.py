"""What the probe looks for, and where a verifier might read a reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.agent_server.probe_secrets import Secret, in_patches, secrets_of, targets_of

LONG_TEST = "#!/bin/bash\n# a comment that says nothing\n" + "".join(
    f"check_number {k} of /app/result.txt\n" for k in range(5)
)


def write(task: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return task


def test_scripts_patches_and_test_code_are_secret(tmp_path: Path) -> None:
    task = write(
        tmp_path,
        {
            "solution/solve.sh": "#!/bin/bash\npython /solution/make_it.py --all\n",
            "solution/fix.patch": "+    return the_right_answer\n",
            "solution/data.csv": "a,b,c\n1,2,three-hundred-and-one\n",
            "solution/image.png": b"\x89PNG\0\0" * 20,
            "tests/test.sh": LONG_TEST,
            "tests/short.sh": "#!/bin/bash\npytest /tests\n",
            "tests/input.json": '{"an input of the tests": "that the environment has as well"}' * 3,
            "steps/one/solution/solve.sh": "#!/bin/bash\necho first step is done > /app/one\n",
        },
    )
    found = {secret.path: secret for secret in secrets_of(task)}
    assert {name for name, secret in found.items() if secret.strict} == {
        "solution/solve.sh",
        "solution/fix.patch",
        "steps/one/solution/solve.sh",
        "tests/test.sh",
    }
    assert {name for name, secret in found.items() if not secret.strict} == {"solution/data.csv"}
    assert "comment" not in " ".join(found["tests/test.sh"].lines)


def test_a_secret_is_found_whatever_stands_around_its_lines(tmp_path: Path) -> None:
    write(tmp_path, {"tests/test.sh": LONG_TEST})
    (secret,) = secrets_of(tmp_path)
    copy = "header\n" + LONG_TEST.replace("\n", "\n\t")
    assert secret.is_in(copy)
    assert secret.telling in copy
    assert not secret.is_in(copy.replace("check_number 3", "check_number"))


PATCH = "cd /app && git apply <<'END'\n+def answer():\n+    return compute(6, 7)\nEND\n"
HISTORY = "commit abc\n+++ b/fix.py\n+def answer():\n+    return compute(6, 7)\n"


@pytest.mark.parametrize(
    ("history", "found"),
    [(HISTORY, True), (HISTORY.replace("+", "-"), False), ("commit abc\n+unrelated\n", False)],
)
def test_a_patch_is_found_in_the_commits_that_add_it(history: str, found: bool) -> None:
    lines = tuple(line.strip() for line in PATCH.splitlines() if len(line.strip()) > 7)
    assert in_patches(Secret("solution/solve.sh", lines, strict=True), history) is found


def test_paths_that_the_tests_name_are_targets(tmp_path: Path) -> None:
    text = (
        "#!/bin/bash\nscore=$(cat /app/score.txt) # see /usr/bin/env, http://host/path\n"
        'grep ok result.json && cp "/data/deep/out.log" /logs/verifier/reward.txt\n'
        "python /tests/check.py ${PLACE}/inner.txt\n"
    )
    write(tmp_path, {"tests/test.sh": text, "tests/data.txt": "/not/code.txt"})
    assert set(targets_of(tmp_path)) == {"/app/score.txt", "result.json", "/data/deep/out.log"}
