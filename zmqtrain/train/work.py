"""The seam between a worker's loop and what it computes: a torch model, or a model of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.collectives.group import Group
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Bucket, Exchange, Replica
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.train.shares import Shares


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was like on one worker."""

    loss: float | None  # mean over the worker's samples; None where nothing is computed
    samples: int
    compute_s: float  # the whole step in the compute thread, without waiting
    exposed_s: float  # waiting for parameters, and for the network between this worker and the FC server
    fc_wait_s: float | None = None  # waiting for the FC server, its own computing and queue included; None where there is none
    data_s: float = 0.0  # waiting for the batch, before the step's computing began


class Work(Protocol):
    """What one worker computes. All methods on the loop's thread."""

    @property
    def replica(self) -> Replica: ...

    @property
    def shares(self) -> Shares:
        """Which samples of each step are this worker's (unless they come from the ring)."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """None: nobody knows before the data ends."""
        ...

    async def more(self, step: int) -> bool:
        """Whether there is data for ``step``; the same for all workers. Call it before each step."""
        ...

    def epoch(self, step: int) -> int:
        """The epoch that ``step`` is in; of the step that comes next, or is computed."""
        ...

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        ...

    def describe(self) -> dict[str, EventValue]:
        """Sizes, for the record: parameters, buckets, ..."""
        ...

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        """Hand complete buckets to ``on_ready``."""
        ...

    async def restore(self, endpoint: Endpoint, exchange: Exchange) -> int | None:
        """Take back this worker's part of the checkpoint that the run resumes, if it does. Returns the step to go on with."""
        ...

    async def save(self, endpoint: Endpoint, exchange: Exchange, step: int) -> bool:
        """Send this worker's part of the checkpoint at ``step``; on return it is on disk. False: there is nothing to save."""
        ...

    async def train_step(self, step: int, *, ahead: bool, hand_over: bool = True) -> StepResult:
        """Forward and backward. ``ahead``: another step follows, so its batch may be fetched meanwhile. Without ``hand_over`` the
        gradients are only added to those of the steps that follow."""
        ...

    def after_step(self) -> None:
        """The step's update is done, or on its way to the servers."""

    def updating_s(self) -> float:
        """Seconds that local updates took since the last call."""
        ...

    async def quiet(self) -> None:
        """Wait until nothing is computed and the parameters of all buckets are there."""

    async def evaluate(self, group: Group, tag: str, *, mean: bool = False) -> dict[str, float]:
        """Evaluate together with the group's other members, each its own parameters on a share of the data; with ``mean`` the exact
        mean of all members' parameters, which have their own again afterwards."""
        ...

    async def make_equal(self, group: Group, tag: str, *, mean: bool = False) -> float:
        """Take the parameters of the group's first member, or the mean of all members'. Returns how far this worker's were from
        them: the largest difference of any."""
        ...

    async def close(self, timeout_s: float) -> None: ...
