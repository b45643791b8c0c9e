"""The seam between a worker's replica and the ways to exchange it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from zmqtrain.collectives.group import Group
from zmqtrain.wire.payload import Payload, Value


@dataclass(frozen=True, slots=True)
class Rows:
    """How a bucket's parameters are divided within a compute group: each row of its grid has its own part, and only the workers of
    a row exchange it."""

    positions: tuple[tuple[int, ...], ...]
    """For each row, the positions of its workers in their group."""
    numels: tuple[int, ...]
    """Elements of the bucket on each row."""
    own: int
    """The number of this worker's row."""

    def within(self, group: Group) -> Group:
        """Those of ``group``, which is one compute group or several, that have this worker's part."""
        size = sum(map(len, self.positions))
        here = self.positions[self.own]
        return group.part(tuple(rank for rank in range(group.size) if rank % size in here))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients travel together; one dtype and one optimizer parameter group.

    Buckets are numbered in backward order: bucket 0 holds the model's last parameters and its gradients are ready first;
    the bucket with the highest index is needed first by the next forward.
    """

    index: int
    parameters: Payload  # flat view of the replica's own memory, `numel` elements
    gradients: Payload  # flat view, same size
    parameter_group: int  # which of the optimizer's parameter groups
    names: tuple[str, ...]  # the module's parameter names, in the order in which they lie in the bucket
    rows: Rows | None = None  # None: all workers of a group have the same parameters
    starts: tuple[
        int, ...
    ] = ()  # where each parameter begins, if gradients say what was not reached (`zmqtrain.exchange.unreached`)

    def sharers(self, group: Group) -> Group:
        """Those of ``group``, one compute group or several, who have the same part of the model in this bucket as this worker."""
        return group if self.rows is None else self.rows.within(group)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """A torch optimizer as plain data, so that a server can build it without the user's code or a pickle.

    ``name`` is ``module:Class``; ``groups`` holds the hyperparameters (numbers, strings, booleans, lists) of each parameter
    group, without the parameters.
    """

    name: str
    groups: tuple[Mapping[str, Value], ...]


class Optimize(Enum):
    """When the local optimizer runs."""

    APART = "apart"
    """When the exchange calls `Replica.update`, if ever: servers may run it instead."""
    BEFORE = "before"
    """On each bucket as soon as backward has its gradients; then the bucket is handed over, with new parameters."""
    AFTER = "after"
    """On each bucket when the next forward takes it back, with the gradients that the exchange has made of it."""


class Sharing(Protocol):
    """Gradients that lie in memory which several workers of a host share, and are summed there. Called by the replica, in the
    compute thread (`writable` on the loop's)."""

    @property
    def sums(self) -> Sequence[Payload]:
        """The sum of each bucket, by which parameters are updated. It is read-only unless it is the bucket's own memory."""
        ...

    def wait_writable(self) -> None:
        """Wait until the gradients of the previous step are no longer read, so that those of the next step can be written.

        Raises `PeerLostError`, `PeerTimeoutError`, or what the exchange was ended by."""

    async def writable(self) -> None:
        """`wait_writable` for a replica that has no compute thread."""

    def produced(self, index: int) -> None:
        """The bucket's gradients are complete. Before the exchange's ``bucket_ready``, and in the same order. Never blocks."""

    def taken(self, index: int) -> None:
        """The update by the bucket's sum is done. Once a bucket and step, in any order."""


class Replica(Protocol):
    """A worker's copy of the model, as exchanges see it."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def hyperparameters(self) -> OptimizerSpec:
        """The optimizer as it stands at this step (a schedule may have changed the learning rate)."""
        ...

    def optimize(self, when: Optimize) -> None:
        """Choose when the local optimizer runs, before the first step; `Optimize.APART` where nothing is chosen.

        Bucket by bucket only where the update of a parameter looks at no other: raises `TaskError` for an optimizer of which it is
        known that it does."""

    def share(self, sharing: Sharing) -> None:
        """From now on gradients are summed where they lie, before the exchange has them. Before the first step."""

    def parameters_ready(self, bucket: Bucket) -> None:
        """The exchange is through with the bucket: it has written the parameters for the next step (with `Optimize.AFTER`: the
        gradients to update them by), and no longer reads either. A forward that waits for the bucket goes on and the gradients may
        be zeroed. Called on the loop's thread, once a bucket and step."""

    def abort(self, error: BaseException) -> None:
        """The exchange broke: every wait for parameters, now and later, raises ``error`` instead. Called on the loop's thread;
        ``end_step`` and ``settle`` raise the error as well."""

    def judged(self, finite: bool, step: int) -> bool:
        """Hear whether the gradient of ``step``, that of all who update together, is finite; where it is not, no worker updates by
        it. For exchanges whose servers run the optimizer, before parameters of the step come. Returns ``finite``."""
        ...

    async def update(self, *, hold: bool = False) -> None:
        """Clip the gradients if the job asks for it, and run the local optimizer on all parameters, in the device's compute thread.
        For exchanges without a server, with `Optimize.APART`.

        Afterwards all buckets count as ready, and the exchange calls `parameters_ready` only for those that it changes once more
        before the step ends. With ``hold`` none does until it is called for it."""


class RunModel(Enum):
    """Where the run's model is, for which evaluations and checkpoints speak; the value is for people."""

    REPLICA = "the parameters that all workers have"
    SERVERS = "the model servers' parameters"
    MEAN = "the mean of all groups' parameters"
    CENTER = "the center of elastic averaging"


class Exchange(Protocol):
    """How this group's replica stays in touch with the others. One instance a worker; all methods on the loop's thread.

    The life of a step::

        (compute thread)  forward: waits for each bucket's parameters as it reaches the layer
        (compute thread)  backward: when a bucket's gradients are complete -> bucket_ready(bucket)
        (loop)            end_step(): gradients of all buckets were handed over; returns when the next step may begin

    Who has and who needs which member (*loop*: `zmqtrain.train.loop`; *sessions*: `zmqtrain.embed`; *scripts*: sessions and
    ``DistributedDataParallel``, `zmqtrain.c10d`; *checkpoints*: `zmqtrain.train.checkpoint`):

    ==================================  =================  ===========================  ============================================
    member                              does something in  called by                    for
    ==================================  =================  ===========================  ============================================
    start, settle, stop                 all                loop, scripts                the beginning and the end
    begin_step, bucket_ready, end_step  all                loop, scripts                every step
    synchronous                         all                loop                         who evaluates and who stops together
    averaged, model                     all                loop, sessions, checkpoints  what is evaluated and kept
    exchanges                           allreduce          loop, sessions, checkpoints  steps whose gradients are only added up
    keep                                model_server       loop                         the servers' parts of a checkpoint
    read                                model_server       loop, sessions               the run's model, where servers have it
    leave                               model_server       loop, sessions               workers that have no more data
    staleness                           model_server       loop, sessions               the record
    center                              averaging          checkpoints                  the run's model, where that is it
    state_dict, load_state_dict         gossip, averaging  checkpoints                  what the exchange itself goes on from
    ==================================  =================  ===========================  ============================================

    In the others a member does what `zmqtrain.exchange.serverless.Serverless` does: nothing.
    """

    @property
    def synchronous(self) -> bool:
        """Whether all groups hold the same parameters at the same step."""
        ...

    @property
    def averaged(self) -> bool:
        """Whether the groups' models differ and the run's model is their mean; the groups evaluate together all the same."""
        ...

    @property
    def model(self) -> RunModel:
        """Where the run's model is."""
        ...

    async def start(self, replica: Replica, *, restored: bool = False) -> int | None:
        """Make all replicas equal to rank 0's (to the servers', if ``restored`` from a checkpoint).

        Returns the step to begin with where this worker joins a run that is under way, and has taken over another's parameters."""
        ...

    def begin_step(self, step: int) -> None:
        """The forward of ``step`` is about to begin."""

    def exchanges(self, step: int) -> bool:
        """Whether the buckets of ``step`` are handed over; otherwise its gradients are added to those of the steps that follow."""
        ...

    def bucket_ready(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete. Never blocks; called in the same order on all workers of a group."""

    async def end_step(self) -> None:
        """All buckets of the step were handed over, if any are. On return the next step may begin; with overlap, parameters of some
        buckets may still be on their way, and the replica's gates hold the forward back until they are there."""

    async def settle(self) -> None:
        """Wait until the parameters of all buckets are there (before evaluation, checkpoints and the end)."""

    async def keep(self, step: int, *, last: bool, in_turn: bool = True) -> None:
        """Have servers, if there are any, keep their parts of the checkpoint at ``step`` as they are now. Called by worker 0 only,
        after its group's step and before the next. ``last``: no group trains any more. Not ``in_turn``: groups have been stopped
        wherever they were."""

    async def read(self, label: str, *, kept: int | None = None, last: bool = False) -> None:
        """With `RunModel.SERVERS`, all workers of group 0 together: take the parameters that the servers have at a moment after
        this group's last step and before its next; ``kept``: at which the checkpoint of this step was kept, not ``last``.
        ``label`` must be another each time. `settle` comes first."""

    def center(self, bucket: Bucket) -> Payload:
        """With `RunModel.CENTER`: this worker's part of the bucket's center, among its `Bucket.sharers` in the group. Only read."""
        ...

    async def leave(self) -> None:
        """This worker trains no more: no group waits for it from here on. `settle` comes first."""

    async def stop(self) -> None:
        """Finish cleanly: nothing of this worker is left on the way, and servers may end when all have come here."""

    def staleness(self) -> Sequence[int]:
        """The staleness of each read since the last call (server updates between the read and its write); empty if none."""
        ...

    def state_dict(self) -> dict[str, Value]: ...

    def load_state_dict(self, state: Mapping[str, Value]) -> None: ...
