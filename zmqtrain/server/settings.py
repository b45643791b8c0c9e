"""What a model server gets when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """A server's place and its time-outs."""

    index: int
    workers: tuple[PeerId, ...]
    """All workers of the run, by rank; the server ends when all of them have finished."""
    request_s: float = 60.0
    """How long a peer may take to answer a request."""
    barrier_s: float = 600.0
    """How long to wait for the contributions of other servers."""
    elastic: bool = False
    """Whether training goes on without workers that are lost."""


class ServerCheckpoints(Protocol):
    """Where a server's part of a checkpoint is stored."""

    async def save(self, step: int, tensors: dict[str, Tensor], sidecar: dict[str, Value]) -> None: ...

    async def hold_nothing(self, sidecar: dict[str, Value]) -> None:
        """The part of every checkpoint is empty."""

    async def committed(self, step: int) -> None:
        """Wait until the checkpoint of the step is complete, or will never be."""

    async def restore(self) -> tuple[dict[str, Tensor], dict[str, Value]]: ...


#: Makes the place where the parts of a shard, given by its number, are stored.
MakeCheckpoints: TypeAlias = Callable[[int], ServerCheckpoints]
