"""The processes in a container, and how those of an agent are ended, seen from inside.

From inside, since the engine may be on another machine, where a pid of its means nothing here.
Nothing but bash is needed, which Harbor needs as well.
"""

from __future__ import annotations

import asyncio
import json

from miles_core.agent_server.containers import ContainerEnvironment
from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.processes import Member

CALL_LIMIT_S = 30.0
END_LIMIT_S = 3
ATTEMPTS = 3
"""A process of the agent may end the shell that is to end it; the next one finds fewer of them."""

SCAN = r"""scan() {
  parent=() start=() state=()
  local file line pid
  for file in /proc/[0-9]*/stat; do
    line=
    IFS= read -r -d '' line < "$file"
    [ -n "$line" ] || continue
    pid=${line%% *}
    set -- ${line##*) }
    state[pid]=$1 parent[pid]=$2 start[pid]=${20}
  done 2>/dev/null
}
"""
"""Reads what proc(5) says of each process; its name, which it can choose, is skipped."""

LIST = (
    SCAN
    + r"""
scan
for pid in "${!parent[@]}"; do
  [ "$pid" = 1 ] || [ "$pid" = $$ ] || [ "${state[pid]}" = Z ] || echo "$pid ${start[pid]}"
done
echo end
"""
)
END = (
    SCAN
    + r"""
limit=$1
shift
while :; do
  scan
  kept=()
  for one in "$@"; do
    pid=${one%%:*}
    [ "${start[pid]}" != "${one##*:}" ] || kept[pid]=1
  done
  more=1
  while [ -n "$more" ]; do
    more=
    for pid in "${!parent[@]}"; do
      up=${parent[pid]}
      [ -n "${kept[pid]}" ] || [ -z "${kept[up]}" ] || { kept[pid]=1; more=1; }
    done
  done
  left=
  for pid in "${!parent[@]}"; do
    [ "$pid" = 1 ] || [ "$pid" = $$ ] || [ "${state[pid]}" = Z ] || [ -n "${kept[pid]}" ] ||
      left="$left $pid"
  done
  [ -n "$left" ] || { echo end; exit 0; }
  [ "$SECONDS" -lt "$limit" ] || { echo "left:$left"; exit 1; }
  kill -KILL $left 2>/dev/null
done
"""
)


async def members(environment: ContainerEnvironment) -> frozenset[Member]:
    """The processes in the main container without its first one; raises SandboxError."""
    said = await _inside(environment, LIST)
    if not said.endswith("end"):
        raise SandboxError(f"the processes in the container could not be listed: {said[-300:]}")
    pairs = [line.split() for line in said.splitlines()[:-1]]
    return frozenset((int(pair[0]), pair[1]) for pair in pairs if len(pair) == 2)


async def end_members(environment: ContainerEnvironment, spared: frozenset[Member]) -> None:
    """SIGKILL the processes in the main container that are not spared and descend from none.

    Raises SandboxError when some are still there after a few seconds.
    """
    kept = [f"{pid}:{start}" for pid, start in spared]
    for _ in range(ATTEMPTS):
        said = await _inside(environment, END, str(END_LIMIT_S), *kept)
        if said.endswith("end"):
            return
    raise SandboxError(f"processes of the agent could not be ended: {said[-300:]}")


async def _inside(environment: ContainerEnvironment, script: str, *arguments: str) -> str:
    """Run a script as root in the main container of an environment; what it prints."""
    container = await environment.main_container()
    mode = json.loads(await environment.engine("inspect", container))[0]["HostConfig"]["PidMode"]
    if mode not in ("", "private"):
        raise SandboxError(f"the container shares its processes (pid: {mode}) with others")
    call = environment.engine(
        *["exec", "--user", "0", container, "bash", "-c", script, "bash", *arguments],
        check=False,
    )
    try:
        async with asyncio.timeout(CALL_LIMIT_S):
            return (await call).strip()
    except TimeoutError as error:
        raise SandboxError("the container does not let a process of ours run") from error
