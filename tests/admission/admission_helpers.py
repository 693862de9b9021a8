"""Tasks of every state, and a real agent server to check them on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from task_directories import DOCKERFILE, TOML, check_of, solution_of
from task_directories import make_task as make_any

ANSWER = "forty-two"
CHECK = check_of(ANSWER)
SOLVE = solution_of(ANSWER)
INSTRUCTION = "Write the answer into /app/answer.txt\n"
make_task = partial(make_any, test=CHECK, solve=SOLVE, instruction=INSTRUCTION)
"""A task directory; the default one wants /app/answer.txt to hold a word."""

STEPS = """schema_version = "1.4"
[environment]
network_mode = "no-network"
[[steps]]
name = "one"
"""
GIT_HISTORY = """FROM debian:12-slim
WORKDIR /app
RUN git init -q . && git config user.email a@b.c && git config user.name n && \\
    echo one > file && git add . && git commit -q -m one && git checkout -q -b later && \\
    printf 'def answer():\\n    return compute_the_answer(6, 7)\\n' > fix.py && \\
    git add . && git commit -q -m two && git checkout -q -
"""
PATCH = """#!/bin/bash
cd /app && git apply <<'END'
--- /dev/null
+++ b/fix.py
@@ -0,0 +1,2 @@
+def answer():
+    return compute_the_answer(6, 7)
END
echo forty-two > /app/answer.txt
"""
COPIED = f"A hint for the reader:\n  {SOLVE.splitlines()[1]}\n"


def make_all(root: Path) -> dict[str, str]:
    """A task for each way in which the checks can go; the state that each has to get."""
    copied = {"environment/notes.txt": COPIED}
    with_copy = DOCKERFILE + "COPY notes.txt /srv/deep/notes\n"
    tests_baked = DOCKERFILE + "RUN mkdir /tests && echo secret > /tests/expected\n"
    reads = "#!/bin/bash\ncat /app/score.txt > /logs/verifier/reward.txt || exit 0\n"
    keeps = '#!/bin/bash\n[ -s /logs/agent/reward.txt ] && cp /logs/agent/reward.txt "$1"\n'
    keeps = keeps.replace(
        '"$1"', "/logs/verifier/reward.txt && exit 0\n" + CHECK[len("#!/bin/bash\n") :]
    )
    make_task(root, "good")
    make_task(root, "oracle-fails", solve="#!/bin/bash\necho wrong > /app/answer.txt\n")
    make_task(root, "nop-passes", test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    make_task(root, "reads-a-file", test=reads, solve="#!/bin/bash\necho 1 > /app/score.txt\n")
    make_task(root, "keeps-a-reward", test=keeps)
    make_task(root, "writes-nothing", test="#!/bin/bash\nexit 3\n")
    make_task(root, "copied", dockerfile=with_copy, files=copied)
    make_task(root, "tests-baked", dockerfile=tests_baked)
    make_task(root, "in-git", dockerfile=GIT_HISTORY, solve=PATCH)
    make_task(root, "no-solution", solve=None)
    make_task(root, "broken-toml", toml="[agent\n")
    make_task(root, "unsupported", dockerfile="FROM nvidia/cuda:12\n")
    make_task(root, "hangs", solve="#!/bin/bash\nsleep 1000\n", agent_s=1.0)
    make_task(root, "verifier-hangs", test="#!/bin/bash\nsleep 1000\n", verifier_s=1.0)
    silent = "#!/bin/bash\n(: < /dev/tcp/192.0.2.1/80) 2>/dev/null && r=1 || r=0\n"
    silent += "echo $r > /logs/verifier/reward.txt\n"
    may_need = TOML.replace('network_mode = "no-network"\n', "")
    make_task(root, "silent-need", test=silent, toml=may_need)
    make_task(root, "odd name")
    (make_task(root, "no-tests") / "tests/test.sh").unlink()
    (make_task(root, "no-instruction") / "instruction.md").unlink()
    (make_task(root, "no-toml") / "task.toml").unlink()
    (make_task(root, "a-step-without-tests", toml=STEPS) / "tests/test.sh").unlink()
    states = dict.fromkeys((path.name for path in root.iterdir()), "failed")
    states |= {"good": "admitted", "no-solution": "unproven", "unsupported": "unsupported"}
    return states
