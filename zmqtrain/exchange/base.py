"""The interface between a worker's replica and the exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from zmqtrain.collectives.group import Group
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """How a bucket's parameters are divided within a compute group: each row of its grid has its own part, which only the workers
    of that row exchange."""

    positions: tuple[tuple[int, ...], ...]
    """For each row, the positions of its workers in their group."""
    numels: tuple[int, ...]
    """The number of the bucket's elements on each row."""
    own: int
    """The number of this worker's row."""
    starts: tuple[tuple[int, ...], ...] = ()
    """For each row, where each parameter begins of which it has a part."""

    def within(self, group: Group) -> Group:
        """The members of ``group`` (one or several compute groups) that have this worker's part."""
        size = sum(map(len, self.positions))
        here = self.positions[self.own]
        return group.part(tuple(rank for rank in range(group.size) if rank % size in here))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are sent together; they have one dtype and one optimizer parameter group.

    Buckets are numbered in backward order: bucket 0 holds the model's last parameters and its gradients are ready first;
    the bucket with the highest index is needed first by the next forward.
    """

    index: int
    parameters: Payload  # flat view of the replica's own memory, `numel` elements
    gradients: Payload  # flat view, same size
    parameter_group: int  # index of the optimizer's parameter group
    names: tuple[str, ...]  # the module's parameter names, in the order in which they lie in the bucket
    rows: Rows | None = None  # None: all workers of a group have the same parameters
    starts: tuple[
        int, ...
    ] = ()  # where each parameter begins, if gradients mark unreached parameters (`zmqtrain.collectives.unreached`)
    shapes: tuple[tuple[int, ...], ...] = ()  # the shape of each of `names`, as this worker has it; empty if not known

    def sharers(self, group: Group) -> Group:
        """The members of ``group`` (one or several compute groups) that have the same part of the model in this bucket."""
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
    """When the exchange calls `Replica.update`, if it does: servers may run the optimizer instead."""
    BEFORE = "before"
    """On each bucket as soon as backward has computed its gradients; the bucket is then handed over with new parameters."""
    AFTER = "after"
    """On each bucket when the next forward takes it back, with the gradients that the exchange has returned."""


class Sharing(Protocol):
    """Gradients in memory that several workers of a host share, where they are summed. Called by the replica in the compute thread
    (`writable` on the loop's thread)."""

    @property
    def sums(self) -> Sequence[Payload]:
        """The sum of each bucket, for the update of its parameters. It is read-only unless it is the bucket's own memory."""
        ...

    def wait_writable(self) -> None:
        """Wait until the gradients of the previous step are no longer being read, so that those of the next step can be written.

        Raises `PeerLostError`, `PeerTimeoutError`, or the error that ended the exchange."""

    async def writable(self) -> None:
        """`wait_writable` for a replica without a compute thread."""

    def produced(self, index: int) -> None:
        """The bucket's gradients are complete. Called before the exchange's ``bucket_ready``, in the same order. Never blocks."""

    def taken(self, index: int) -> None:
        """The update with the bucket's sum is done. Called once per bucket and step, in any order."""


class Replica(Protocol):
    """A worker's copy of the model, as exchanges see it."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def hyperparameters(self) -> OptimizerSpec:
        """The optimizer's hyperparameters at this step (a schedule may have changed the learning rate)."""
        ...

    def optimize(self, when: Optimize) -> None:
        """Choose when the local optimizer runs; call it before the first step. The default is `Optimize.APART`.

        Running it bucket by bucket requires that the update of a parameter depends on no other parameter. Raises `TaskError` for an
        optimizer that is known not to work in this way."""

    def share(self, sharing: Sharing) -> None:
        """From now on gradients are summed in place, before the exchange gets them. Call it before the first step."""

    def parameters_ready(self, bucket: Bucket) -> None:
        """The exchange has finished with the bucket: it has written the parameters for the next step (with `Optimize.AFTER`: the
        gradients for their update) and no longer reads either. A forward that waits for the bucket continues, and the gradients may
        be zeroed. Called on the loop's thread, once per bucket and step."""

    def abort(self, error: BaseException) -> None:
        """The exchange broke: every wait for parameters, now and later, raises ``error``, as do ``end_step`` and ``settle``. Called
        on the loop's thread."""

    def judged(self, finite: bool, step: int) -> bool:
        """Learn whether the gradient of ``step``, over all who update together, is finite; if it is not, no worker updates with it.
        For exchanges whose servers run the optimizer; called before parameters of the step arrive. Returns ``finite``."""
        ...

    async def update(self, *, hold: bool = False) -> None:
        """Clip the gradients if the job asks for it, and run the local optimizer on all parameters, in the device's compute thread.
        For exchanges without a server, with `Optimize.APART`.

        Afterwards all buckets count as ready, and the exchange calls `parameters_ready` only for those that it changes once more
        before the step ends. With ``hold`` a bucket is ready only when it is called for it."""

    async def beside(self) -> tuple[Mapping[str, Payload], Mapping[str, Value]]:
        """Finish due updates, and return copies of everything beside the parameters that another worker needs to go on like this
        one: the optimizer's state and the model's buffers. For exchanges that take in late workers; called between steps, when no
        bucket is under way."""
        ...

    async def take_beside(self, tensors: Mapping[str, Payload], values: Mapping[str, Value]) -> None:
        """Go on with what `beside` of another worker has returned; the memory is the replica's from now on."""


@runtime_checkable
class Resumable(Protocol):
    """An exchange whose servers may begin with pieces of a checkpoint that were divided anew."""

    def division(self, replica: Replica) -> list[Value]:
        """How servers divide the replica's model, as the exchange's `state_dict` tells of it once it has started."""

    def hand_to_servers(self, pieces: Callable[[int, int, int], tuple[dict[str, Tensor], int]], step: int) -> None:
        """Give servers what ``pieces(bucket, start, stop)`` returns (tensors, as `zmqtrain.server.checkpoint` keeps them, and the
        piece's version) when the exchange starts. Training goes on with ``step``. Call it on all workers."""


class RunModel(Enum):
    """Where the run's model is, which evaluations and checkpoints use; the value is its description in messages."""

    REPLICA = "the parameters that all workers have"
    SERVERS = "the model servers' parameters"
    MEAN = "the mean of all groups' parameters"
    CENTER = "the center of elastic averaging"


class Exchange(Protocol):
    """How this group's replica stays in agreement with the others. One instance per worker; all methods are called on the loop's
    thread.

    The life of a step::

        (compute thread)  forward: waits for each bucket's parameters as it reaches the layer
        (compute thread)  backward: when a bucket's gradients are complete -> bucket_ready(bucket)
        (loop)            end_step(): gradients of all buckets were handed over; returns when the next step may begin

    Which exchange implements which member, and who calls it (*loop*: `zmqtrain.train.loop`; *sessions*: `zmqtrain.embed`;
    *scripts*: sessions and ``DistributedDataParallel``, `zmqtrain.c10d`; *checkpoints*: `zmqtrain.train.checkpoint`):

    ==================================  =================  ===========================  ============================================
    member                              does something in  called by                    for
    ==================================  =================  ===========================  ============================================
    start, settle, stop                 all                loop, scripts                the beginning and the end
    begin_step, bucket_ready, end_step  all                loop, scripts                every step
    synchronous                         all                loop                         who evaluates and who stops together
    averaged, model                     all                loop, sessions, checkpoints  what is evaluated and kept
    exchanges                           allreduce          loop, sessions, checkpoints  steps whose gradients are only accumulated
    repeats                             model_server,      loop                         steps that are given up
                                        averaging
    sit_out                             all but allreduce  loop                         steps without a batch for this group
    may_begin                           all but            loop                         what lost workers have left at the end
                                        model_server
    keep                                model_server       loop                         the servers' parts of a checkpoint
    read                                model_server       loop, sessions               the run's model, if servers have it
    leave                               model_server       loop, sessions               workers that have no more data
    staleness                           model_server       loop, sessions               the record
    center                              averaging          checkpoints                  the run's model, if it is the center
    weight                              averaging          checkpoints                  the run's model, if it is a mean
    state_dict, load_state_dict         gossip, averaging  checkpoints                  the exchange's own state
    ==================================  =================  ===========================  ============================================

    In the other exchanges a member does what `zmqtrain.exchange.serverless.Serverless` does: nothing.
    """

    @property
    def synchronous(self) -> bool:
        """Whether all groups hold the same parameters at the same step."""
        ...

    @property
    def averaged(self) -> bool:
        """Whether the groups' models differ and the run's model is their mean, so that the groups evaluate together."""
        ...

    @property
    def model(self) -> RunModel:
        """Which process holds the parameters that become the run's model, and how they are obtained."""
        ...

    async def start(self, replica: Replica, *, restored: bool = False) -> int | None:
        """Make all replicas equal to rank 0's (or to the servers' parameters, if ``restored`` from a checkpoint).

        Returns the first step if this worker joins a running training and has taken over another worker's parameters; else
        ``None``."""
        ...

    def begin_step(self, step: int) -> None:
        """The forward of ``step`` is about to begin."""

    def exchanges(self, step: int) -> bool:
        """Whether the buckets of ``step`` are handed over; otherwise its gradients are accumulated for the steps that follow."""
        ...

    def bucket_ready(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete. Never blocks; called in the same order on all workers of a group."""

    async def end_step(self) -> None:
        """All buckets of the step were handed over, if any. On return the next step may begin. With overlap, parameters of some
        buckets may still be on their way; the replica's gates hold the forward back until they arrive."""

    def repeats(self, step: int) -> bool:
        """After `end_step`: whether ``step`` was given up, because a worker of the group is lost or has come, and must be trained
        once more before it has ended."""
        ...

    async def sit_out(self, step: int) -> None:
        """In place of all the above: this worker's group has no batch in ``step``, and others have. On return it has the parameters
        for the next step. `repeats` is asked afterwards, too."""

    async def may_begin(self, step: int) -> bool:
        """Called before the forward of ``step``, for which all is ready on return. False: it turns out that there is nothing to
        train, as far as is known."""
        ...

    async def settle(self) -> None:
        """Wait until the parameters of all buckets have arrived (before evaluations, checkpoints and the end)."""

    async def keep(self, step: int, *, last: bool, in_turn: bool = True) -> None:
        """Have servers, if there are any, keep the current state of their parts for the checkpoint at ``step``. Called by worker 0
        only, after its group's step and before the next one. ``last``: no group trains any more. Not ``in_turn``: groups were
        stopped in the middle of steps."""

    async def read(self, label: str, *, kept: int | None = None, last: bool = False) -> None:
        """With `RunModel.SERVERS`, called by all workers of group 0 together: take the servers' parameters as they are at a moment
        after this group's last step and before its next. ``kept``: as they were kept for the checkpoint at this step, unless
        ``last``.
        ``label`` must differ in each call. Call `settle` first."""

    def center(self, bucket: Bucket) -> Payload:
        """With `RunModel.CENTER`: this worker's part of the bucket's center, among its `Bucket.sharers` in the group. Read-only."""
        ...

    def weight(self, group: Group) -> float | None:
        """With `RunModel.MEAN`: the weight of this worker's parameters in the mean over ``group``; ``None``: all have the same."""
        ...

    async def require_alike(self, group: Group, tag: str) -> None:
        """Raise `ProtocolError` on all of ``group``, which call it at the same step, if they differ in what the exchange keeps
        equal beside the parameters. It compares samples, so it costs next to nothing."""

    async def leave(self) -> None:
        """This worker trains no more: no group waits for it from now on. Call `settle` first."""

    async def stop(self, *, failed: bool = False) -> None:
        """Finish cleanly: nothing of this worker is still being sent, and servers may end once all workers have called this.
        ``failed``: unless the run survives the loss of this worker, and servers wait for others to train what it leaves."""

    def staleness(self) -> Sequence[int]:
        """The staleness of each read since the last call (server updates between the read and its write); empty if there were
        none."""
        ...

    def state_dict(self) -> dict[str, Value]: ...

    def load_state_dict(self, state: Mapping[str, Value]) -> None: ...
