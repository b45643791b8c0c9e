"""The interface between a worker's loop and what it computes: a torch model, or a modelled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from zmqtrain.collectives.group import Group
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Bucket, Exchange, Replica
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.train.shares import Shares
from zmqtrain.wire.payload import Value

if TYPE_CHECKING:
    from torch import Tensor

    from zmqtrain.train.callbacks import Callbacks

#: A model's state, by name.
ModelState: TypeAlias = "Mapping[str, Tensor]"
#: What came of an evaluation: its metrics; the error with which it failed here; or ``None``, if it failed on another member.
Outcome: TypeAlias = "dict[str, float] | TaskError | UsageError | None"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The measurements of a step on one worker."""

    loss: float | None  # mean over the worker's samples; None if nothing is computed
    samples: int
    compute_s: float  # the whole step in the compute thread, without waits
    exposed_s: float  # waits for parameters, and for the network between this worker and the FC server
    fc_wait_s: float | None = None  # waits for the FC server, including its computing and its queue; None without FC server
    data_s: float = 0.0  # wait for the batch, before the step's computation began


class Work(Protocol):
    """What one worker computes. All methods are called on the loop's thread."""

    @property
    def replica(self) -> Replica: ...

    @property
    def whole_updates(self) -> bool:
        """Whether a local optimizer must run on all parameters at once."""
        ...

    @property
    def shares(self) -> Shares:
        """Which samples of each step belong to this worker (unless they come from the ring)."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """None if it is not known before the data ends."""
        ...

    def end(self, epochs: int) -> int | None:
        """The step before which so many epochs end; ``None`` if it is not known before the data ends."""
        ...

    def trained(self, step: int) -> int:
        """The number of samples of all steps before ``step``, if no worker is lost."""
        ...

    async def take_course(self, endpoint: Endpoint) -> None:
        """For a worker that comes late: know which samples a step takes in a run that was resumed with other groups."""

    async def more(self, step: int) -> bool:
        """Whether there is data for ``step``; the same for all workers. Call it before each step."""
        ...

    def epoch(self, step: int) -> int:
        """The epoch of ``step``, which is being computed or comes next."""
        ...

    @property
    def evaluates(self) -> bool:
        """Whether there is data to evaluate on."""
        ...

    def describe(self) -> dict[str, EventValue]:
        """Sizes for the record: parameters, buckets and so on."""
        ...

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        """Hand complete buckets to ``on_ready``."""
        ...

    async def restore(self, endpoint: Endpoint, exchange: Exchange) -> int | None:
        """Restore this worker's part of the checkpoint that the run resumes, if any. Returns the step to continue with, or
        ``None``."""
        ...

    async def begin_alike(self, group: Group, restored: bool) -> None:
        """Have what the exchange does not send of the model from the first member of ``group``, which are all workers."""

    @property
    def keeps(self) -> bool:
        """Whether there is a model to keep, and a state to resume from."""
        ...

    async def save(self, endpoint: Endpoint, exchange: Exchange, step: int) -> None:
        """Send this worker's part of the checkpoint at ``step``; on return it is on disk."""

    async def keep_merged(self, step: int, *, save: bool) -> None:
        """Worker 0: have the FC server, if there is one, keep the current state of its part of the model for ``step``. ``save``: in
        the checkpoint, too."""

    async def model_state(self, step: int, *, copied: bool, to: int = 0) -> ModelState:
        """The whole model's state, with the task's names, on the group's worker of position ``to``; all workers of a group that
        divides its model call it together.
        ``copied``: copy the parameters, since they are about to change."""
        ...

    async def send_model(
        self, endpoint: Endpoint, step: int, state: ModelState, about: Mapping[str, Value], *, alone: bool
    ) -> None:
        """Send the run's model at ``step``; on return it is on disk. ``about``: its description. ``alone``: not in a checkpoint."""

    async def train_step(self, step: int, *, ahead: bool, hand_over: bool = True) -> StepResult:
        """Forward and backward. ``ahead``: another step follows, so its batch may be fetched in the meantime. Without ``hand_over``
        the gradients are only accumulated for the steps that follow."""
        ...

    @property
    def lr(self) -> float | None:
        """The learning rate of the coming update, of the optimizer's first parameter group; ``None`` without an optimizer."""
        ...

    @property
    def callbacks(self) -> Callbacks:
        """The callbacks of the task."""
        ...

    async def call_back(self) -> None:
        """Make the calls that wait in `callbacks`, in the compute thread. Raises `TaskError`."""

    async def compare(self, done: int, first: int) -> None:
        """``done`` steps are done, of which this worker trained those from ``first`` on: look whether workers that train in step
        have the same buffers. Called by all that have trained the last step."""

    def after_step(self) -> None:
        """The step's update is done, or has been sent to the servers."""

    def sat_out(self, step: int) -> None:
        """Called in place of a step that only others had something to train in."""

    def updating_s(self) -> float:
        """Seconds that local updates have taken since the last call."""
        ...

    async def quiet(self) -> None:
        """Wait until nothing is being computed and the parameters of all buckets have arrived."""

    async def evaluate(self, group: Group, tag: str, *, still: bool = False) -> Outcome:
        """Evaluate together with the group's other members: each its own parameters, on a share of the data. ``still``: other
        groups train in the meantime, but the FC server must not change."""
        ...

    async def make_equal(self, group: Group, tag: str) -> float:
        """Take the parameters of the group's first member. Returns the largest difference between this worker's own parameters and
        those."""
        ...

    def state_mean(self, group: Group) -> None:
        """The replica holds the mean of the group's members now: report to an auditor whether it is as expected."""

    async def close(self, timeout_s: float) -> None: ...
