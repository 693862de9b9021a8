"""What one trial's sandboxes have in common on this host, and the trials that are running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harbor.models.task.config import EnvironmentConfig

from miles_core.agent_server.protocol import Phase
from miles_core.agent_server.sandbox.box import Box, BoxSettings
from miles_core.agent_server.sandbox.cgroups import CgroupTree, Limits
from miles_core.agent_server.sandbox.forks import Helpers
from miles_core.agent_server.sandbox.images import Image, Images, Recipe
from miles_core.agent_server.sandbox.layers import Root
from miles_core.agent_server.tasks import TaskProblem
from miles_core.verdicts import Cause

if TYPE_CHECKING:
    from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment

DEFAULT_MEMORY_MB = 4096
DEFAULT_DISK_MB = 2048
PIDS = 512
LEAST_MEMORY_MB = 6
"""With less no command is started; containers have the same least limit (docker run --memory)."""
NAMES_LIMIT = 20
VERIFIER_LOGS = "/logs/verifier"
LOG_FOLDERS = ("/logs", "/logs/agent", VERIFIER_LOGS, "/logs/artifacts")


@dataclass(frozen=True)
class Plan:
    """What a task asks of a sandbox: the directory of its image or a name, disk and limits."""

    directory: Path
    image: str | None
    disk_mb: int
    limits: Limits

    @classmethod
    def of(cls, directory: Path, config: EnvironmentConfig) -> Plan:
        """That of the table `environment` of a task.toml and the directory of the same name.

        Raises TaskProblem for a limit with which nothing can be started.
        """
        memory_mb = int(config.memory_mb or DEFAULT_MEMORY_MB)
        if memory_mb < LEAST_MEMORY_MB:
            problem = f"task.toml: memory_mb = {memory_mb}: no command starts with less than"
            raise TaskProblem(Cause.TASK_INVALID, f"{problem} {LEAST_MEMORY_MB} MB")
        limits = Limits(memory_mb=memory_mb, pids=PIDS, cpus=config.cpus)
        disk_mb = config.storage_mb or DEFAULT_DISK_MB
        return cls(directory, config.docker_image, disk_mb, limits)


@dataclass(frozen=True)
class Made:
    """A started sandbox with its image, which is to be released."""

    recipe: Recipe
    image: Image
    box: Box


class SandboxHost:
    """What one trial's sandboxes are made from on this host."""

    def __init__(
        self,
        trial_id: str,
        images: Images,
        tree: CgroupTree,
        binds: list[tuple[str, str]],
        relays: list[tuple[int, str, int]],
        helpers: Helpers,
    ) -> None:
        self.trial_id = trial_id
        self.images = images
        self.tree = tree
        self.binds = binds
        self.relays = relays
        self.helpers = helpers
        self.environments: list[BubblewrapEnvironment] = []
        self.phase = Phase.ENVIRONMENT
        self.names: dict[Phase, list[str]] = {}
        """The public names that were looked up in each phase, in vain."""
        self._started = 0
        self._early: tuple[Plan, asyncio.Task[Made]] | None = None

    async def prepare(self, plan: Plan) -> None:
        """Begin to make a sandbox that will be asked for, as far as that needs no waiting."""
        self._early = plan, asyncio.create_task(self._make(plan))
        await asyncio.sleep(0)

    async def make(self, plan: Plan) -> Made:
        """Start a sandbox, or take the one that was begun; raises as `Images.take`."""
        early, self._early = self._early, None
        if early is None:
            return await self._make(plan)
        if early[0] != plan:
            await self._drop(early[1])
            return await self._make(plan)
        return await early[1]

    async def _make(self, plan: Plan) -> Made:
        recipe = Recipe(plan.directory, plan.image)
        image = await self.images.take(recipe, self.build_box)
        settings = BoxSettings(
            root=image.root,
            disk_mb=plan.disk_mb,
            limits=plan.limits,
            binds=self.binds,
            relays=self.relays,
            on_name=self.looked_up,
        )
        self._started += 1  # a separate verifier has a sandbox of its own
        box = Box(f"{self.trial_id}-{self._started}", settings, self.tree, self.helpers)
        try:
            await box.start()
        except BaseException:
            await box.close()
            self.images.release(image)
            raise
        return Made(recipe, image, box)

    async def _drop(self, making: asyncio.Task[Made]) -> None:
        making.cancel()
        await asyncio.wait({making})
        if not making.cancelled() and making.exception() is None:
            made = making.result()
            await made.box.close()
            self.images.release(made.image)

    async def build_box(self, name: str, root: Root, told: Callable[[str, bool], None]) -> Box:
        """Start a sandbox in which an image is built; it has nothing of this trial."""
        limits = Limits(memory_mb=DEFAULT_MEMORY_MB, pids=PIDS, cpus=None)
        settings = BoxSettings(root, DEFAULT_DISK_MB, limits, on_name=told)
        box = Box(f"images.{name}", settings, self.tree, self.helpers)
        try:
            await box.start()
        except BaseException:
            await box.close()
            raise
        return box

    def opened(self, environment: BubblewrapEnvironment) -> None:
        self.environments.append(environment)

    def looked_up(self, name: str, by_command: bool) -> None:
        """Note a name; in the verifier's phase what the agent left running does not count."""
        if self.phase is Phase.VERIFIER and not by_command:
            return
        names = self.names.setdefault(self.phase, [])
        if name not in names and len(names) < NAMES_LIMIT:
            names.append(name)

    async def enter(self, phase: Phase) -> None:
        """Begin a phase; the verifier finds its log directories whatever the agent did to them.

        What the verifier writes is out of the reach of what the agent left running.
        """
        self.phase = phase
        for environment in self.environments:
            if not environment.running:
                continue
            environment.box.rejoin()
            if phase is Phase.VERIFIER:
                places, files = environment.verifier_places(), environment.own_files
                await environment.box.seclude(places, LOG_FOLDERS, files)

    def space(self) -> dict[str, int | None]:
        """Bytes that the sandboxes of the trial used, all together; None where nothing tells."""
        boxes = [e.box for e in self.environments if e.started]
        disk = [box.disk_used for box in boxes if box.disk_used is not None]
        memory = [box.memory_peak for box in boxes if box.memory_peak is not None]
        return {
            "disk_bytes": sum(disk) if disk else None,
            "memory_peak_bytes": max(memory) if memory else None,
        }

    async def close(self) -> None:
        """End every sandbox of the trial, by its own handle."""
        early, self._early = self._early, None
        if early is not None:
            await self._drop(early[1])
        for environment in self.environments:
            environment.kill()
            await environment.stop(delete=True)


HOSTS: dict[str, SandboxHost] = {}
"""The trials of this process that are running in this kind of sandbox."""
