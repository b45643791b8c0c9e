"""The seam between a worker's replica and the ways to exchange it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.wire.payload import Payload, Value


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


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """A torch optimizer as plain data, so that a server can build it without the user's code or a pickle.

    ``name`` is ``module:Class``; ``groups`` holds the hyperparameters (numbers, strings, booleans, lists) of each parameter
    group, without the parameters.
    """

    name: str
    groups: tuple[Mapping[str, Value], ...]


class Replica(Protocol):
    """A worker's copy of the model, as exchanges see it."""

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def hyperparameters(self) -> OptimizerSpec:
        """The optimizer as it stands at this step (a schedule may have changed the learning rate)."""
        ...

    def parameters_ready(self, bucket: Bucket) -> None:
        """The exchange has written the bucket's parameters for the next step, and no longer reads its gradients: a forward that
        waits for the bucket goes on and the gradients may be zeroed. Called on the loop's thread, once a bucket and step."""

    def abort(self, error: BaseException) -> None:
        """The exchange broke: every wait for parameters, now and later, raises ``error`` instead. Called on the loop's thread;
        ``end_step`` and ``settle`` raise the error as well."""

    async def update(self, *, gradient_scale: float = 1.0, clip: bool = True) -> None:
        """Multiply all gradients by ``gradient_scale``, clip them if the job asks for it, and run the local optimizer on all
        parameters, in the device's compute thread. For exchanges without a server. Afterwards all buckets count as ready; the
        exchange calls `parameters_ready` only for those that it changes once more."""


class Exchange(Protocol):
    """How this group's replica stays in touch with the others. One instance a worker; all methods on the loop's thread.

    The life of a step::

        (compute thread)  forward: waits for each bucket's parameters as it reaches the layer
        (compute thread)  backward: when a bucket's gradients are complete -> bucket_ready(bucket)
        (loop)            end_step(): gradients of all buckets were handed over; returns when the next step may begin
    """

    @property
    def synchronous(self) -> bool:
        """Whether all groups hold the same parameters at the same step."""
        ...

    async def start(self, replica: Replica, *, restored: bool = False) -> None:
        """Make all replicas equal to rank 0's (to the servers', if ``restored`` from a checkpoint)."""

    def begin_step(self, step: int) -> None:
        """The forward of ``step`` is about to begin."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete. Never blocks; called in the same order on all workers of a group."""

    async def end_step(self) -> None:
        """All buckets of the step were handed over. On return the next step may begin; with overlap, parameters of some buckets
        may still be on their way, and the replica's gates hold the forward back until they are there."""

    async def settle(self) -> None:
        """Wait until the parameters of all buckets are there (before evaluation, checkpoints and the end)."""

    async def stop(self) -> None:
        """Finish cleanly: nothing of this worker is left on the way."""

    def staleness(self) -> Sequence[int]:
        """The staleness of each read since the last call (server updates between the read and its write); empty if none."""
        ...

    def state_dict(self) -> dict[str, Value]: ...

    def load_state_dict(self, state: Mapping[str, Value]) -> None: ...
