"""One save of a rank: copied within the pause of a step, written while the run goes on."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from miles_core.checkpoints import manifest
from miles_core.checkpoints.compare import available_memory
from miles_core.modeling import dist_state
from miles_core.modeling.dist_state import State, Written
from miles_core.training.errors import SaveError

# A copy may take this share of the memory that is left.
SHARE = 0.8


class Save:
    """A checkpoint that grows in `directory`.

    Built and finished by all ranks together. The thread between the two takes part in nothing
    collective, so that training may go on beside it.
    """

    def __init__(self, directory: Path, state: State, background: bool) -> None:
        self._directory = directory
        self._common = state.common
        self._written: Written | None = None
        self._error = ""
        self.background = background and _copies_fit(state.bytes)
        self._state: State | None = state.snapshot() if self.background else state
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self._thread = threading.Thread(
            target=self._write, args=(dist.get_rank(),), name="save", daemon=True
        )
        self._thread.start()

    def _write(self, rank: int) -> None:
        assert self._state is not None
        try:
            self._written = dist_state.write(self._directory, self._state, rank)
        except Exception as error:  # raised on all ranks by `finish`
            self._error = f"{error} (rank {rank})"
        finally:
            self._state = None  # the copies' memory is free again

    @property
    def ended(self) -> bool:
        """Whether this rank has written its files, or failed to."""
        return not self._thread.is_alive()

    def finish(self, add: Callable[[Path], None]) -> manifest.Digests:
        """Wait for all ranks and complete the checkpoint; `add` lets rank 0 put more files into
        it. Size and digest of every shard file on rank 0, nothing elsewhere. Collective.

        Raises SaveError on all ranks when one of them failed; its directory is removed then.
        """
        self._thread.join()
        self._agree()
        assert self._written is not None
        everyone = dist_state.gather(self._written)
        known: manifest.Digests = {}
        try:
            if everyone is not None:
                dist_state.complete(self._directory, everyone, self._common)
                known = {n: digest for part in everyone for n, digest in part.files.items()}
                add(self._directory)
        except (OSError, ValueError) as error:
            self._error = f"{error} (rank {dist.get_rank()})"
        self._agree()
        return known

    def _agree(self) -> None:
        """Raise what any rank has to say. Collective."""
        errors = [""] * dist.get_world_size()
        dist.all_gather_object(errors, self._error)
        said = "; ".join(error for error in errors if error)
        if said:
            if dist.get_rank() == 0:
                shutil.rmtree(self._directory, ignore_errors=True)
            raise SaveError(f"the checkpoint was not saved: {said}")


def _copies_fit(own: int) -> bool:
    """Whether every host has memory for its ranks' copies, of which this rank's has `own` bytes.
    Collective."""
    ranks: list[tuple[str, int, int | None]] = [("", 0, None)] * dist.get_world_size()
    dist.all_gather_object(ranks, (socket.gethostname(), own, available_memory()))
    for host in {name for name, _, _ in ranks}:
        needed = sum(size for name, size, _ in ranks if name == host)
        left = [free for name, _, free in ranks if name == host and free is not None]
        if left and needed > min(left) * SHARE:
            return False
    return True
