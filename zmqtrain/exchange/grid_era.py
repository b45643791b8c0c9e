"""A stretch of a run in which the same workers train on the same grid, of several rows; when one of them is lost, another begins.

Each worker of such a grid has a part of the model that only those of its row have, too, and parts of a step's activations that
nobody else has. So a step in which a worker is lost cannot be finished by the others; it is given up by all, or counts on all. For
that no worker updates its parameters before it knows that all workers have the step's sums::

    own sums are complete ──> summed ──(barrier of all workers)──> counted ──> the parameters are updated

(Gradients that are clipped by the norm of the whole model are clipped before, as that, too, needs a worker of each row.) If any
worker has come as far as *counted*, all have at least *summed*, and can update, too, whoever is lost then. If none has, none has
updated. So the newest step that counts anywhere is what the survivors agree on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import barrier
from zmqtrain.exchange.checkpoint_part import Mark, Part
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.wire.payload import Payload


class StepCommit:
    """How far a worker has come in the steps of an era."""

    def __init__(self) -> None:
        self.summed = -1
        """The newest step of which this worker has all sums."""
        self.counted = -1
        """The newest step of which it knows that all workers have all sums."""
        self.prepare: Callable[[], Awaitable[None]] | None = None
        """Does what is to be done with the sums for which others are needed."""

    def begin(self, step: int) -> None:
        """The era begins with ``step``."""
        self.summed = self.counted = step - 1

    async def all_have(self, group: Group, step: int) -> None:
        """This worker has all sums of ``step``. Returns once that is so of all of ``group``, the workers of the era."""
        if self.prepare is not None:
            await self.prepare()
        self.summed = step
        await barrier(group, ("all have", step))
        self.counted = step


class FetchPart(Protocol):
    """Fetches a part of a checkpoint, as `zmqtrain.exchange.checkpoint_part.fetch_part` does."""

    async def __call__(
        self, name: str, into: Mapping[str, Payload] | None, keep: Callable[[str, Payload], Payload] | None
    ) -> Part | None: ...


@dataclass(frozen=True, slots=True)
class GridEra:
    """What a worker needs to know of the era that it takes part in."""

    mark: Mark
    """Distinguishes its parts of checkpoints from those of other eras."""
    commit: StepCommit
    fetch: FetchPart | None
    """Where the run's state comes from, if others have it; ``None``: the era begins as a run does."""


class EraEnds(Exception):
    """All workers of the era have trained up to the step at which another one begins."""


class StepGate:
    """Lets the steps of an era begin, one after another, up to the one at which it ends, if that is decided."""

    def __init__(self) -> None:
        self.begun = -1
        """The newest step that may have begun."""
        self.stop: int | None = None
        """No step from this one on begins."""
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """No further step may begin, until it is opened again."""
        self._open.clear()

    def open(self) -> None:
        """Further steps may begin, up to `stop`."""
        self._open.set()

    async def release(self, step: int) -> None:
        """Wait until ``step`` may begin. Raises `EraEnds` if it does not."""
        await self._open.wait()
        if self.stop is not None and step >= self.stop:
            raise EraEnds
        self.begun = step


class EraMembers(FixedMembers):
    """Implements `zmqtrain.exchange.members.Members` for the workers of an era: the same ones in all of its steps."""

    def __init__(self, endpoint: Endpoint, members: tuple[PeerId, ...], gate: StepGate, *, timeout_s: float) -> None:
        super().__init__(endpoint, members, timeout_s=timeout_s)
        self._gate = gate

    async def release(self, step: int) -> bool:
        await self._gate.release(step)
        return True
