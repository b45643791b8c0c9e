"""The seam between a worker's loop and what it computes: a torch model, or a model of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from zmqtrain.collectives.group import Group
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Bucket, Exchange, Replica
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.train.shares import Shares
from zmqtrain.wire.payload import Value

if TYPE_CHECKING:
    from torch import Tensor

#: A model's state, by name.
ModelState: TypeAlias = "Mapping[str, Tensor]"


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

    @property
    def keeps(self) -> bool:
        """Whether there is a model to keep, and state to go on from."""
        ...

    async def save(self, endpoint: Endpoint, exchange: Exchange, step: int) -> None:
        """Send this worker's part of the checkpoint at ``step``; on return it is on disk."""

    async def keep_merged(self, step: int, *, save: bool) -> None:
        """Worker 0: have the FC server, if there is one, keep its part of the model at ``step`` as it is now; ``save``: in the
        checkpoint, too."""

    async def model_state(self, step: int, *, copied: bool) -> ModelState:
        """The whole model's state, named as the task's model names it, on worker 0; all workers of a group that divides its model
        call it together. ``copied``: the parameters change soon."""
        ...

    async def send_model(
        self, endpoint: Endpoint, step: int, state: ModelState, about: Mapping[str, Value], *, alone: bool
    ) -> None:
        """Send the run's model at ``step``; on return it is on disk. ``about`` it: for people. ``alone``: not in a checkpoint."""

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

    async def evaluate(self, group: Group, tag: str, *, still: bool = False) -> dict[str, float]:
        """Evaluate together with the group's other members, each its own parameters on a share of the data. ``still``: other groups
        train meanwhile, and the FC server is not to change."""
        ...

    async def make_equal(self, group: Group, tag: str) -> float:
        """Take the parameters of the group's first member. Returns how far this worker's were from them: the largest difference of
        any."""
        ...

    def state_mean(self, group: Group) -> None:
        """The replica is the mean of the group's members now: state to an auditor whether it is what it must be."""

    async def close(self, timeout_s: float) -> None: ...
