"""The content of a modelled replica's buckets: only sizes, zeros in full size, or a few numbers whose final values are known.

========  =============================================  ===========================  ==========================================
kind      a bucket's payload                             the network carries          for
========  =============================================  ===========================  ==========================================
phantom   a size                                         the sizes, nothing else      large simulated worlds
real      zeros, in full                                 all bytes                    real and emulated worlds
small     up to 8 whole numbers a layer, in float64      far less than a real model   checking that nothing is lost or doubled
========  =============================================  ===========================  ==========================================

With ``small`` the buckets are those of the real model but hold very few numbers: times and bytes on the network mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from zmqtrain.arena.arena import Arena
from zmqtrain.data.division import Span
from zmqtrain.exchange.base import Bucket, OptimizerSpec
from zmqtrain.exchange.pieces import Piece
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.topology.schema import Topology
from zmqtrain.train.buckets import BucketPlan
from zmqtrain.train.device.profile import Profile
from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

PayloadKind = Literal["phantom", "small", "real"]
Numbers = npt.NDArray[np.float64]

#: Elements that represent a layer in small payloads: enough to be divided between workers and servers.
SMALL = 8
#: The largest element of a worker's own small gradient, before it is multiplied by the number of groups.
LARGEST = 13
#: Gradients that are remembered: the workers' of some steps, which the auditor computes again.
KEPT = 1 << 15


class Memory(Protocol):
    """Allocates and fills the payloads of one replica."""

    optimizer: OptimizerSpec
    """The optimizer that servers run on the parameters."""

    def payload(self, plan: BucketPlan, *, parameters: bool) -> Payload:
        """Allocate a bucket's parameters or, without ``parameters``, its gradients."""
        ...

    def backward(self, bucket: Bucket, step: int, *, add: bool = False) -> None:
        """Write this worker's gradient of the step into the bucket, or add it."""
        ...

    def update(self, bucket: Bucket, gradients: Payload) -> None:
        """Run the local optimizer on the bucket's parameters with ``gradients``."""
        ...


class NoMemory:
    """Payloads whose content does not matter: phantoms, or zeros in full size."""

    def __init__(self, optimizer: OptimizerSpec, make: Callable[[int, str], Payload]) -> None:
        self.optimizer = optimizer
        self._make = make

    @classmethod
    def phantom(cls, optimizer: OptimizerSpec) -> NoMemory:
        """Payloads that are only sizes."""
        return cls(optimizer, PhantomPayload)

    @classmethod
    def real(cls, optimizer: OptimizerSpec, arena: Arena | None = None) -> NoMemory:
        """Zeros in full size; in the host's shared memory if there is an arena."""
        return cls(optimizer, partial(_zeros, arena))

    def payload(self, plan: BucketPlan, *, parameters: bool) -> Payload:
        return self._make(plan.numel, plan.dtype)

    def backward(self, bucket: Bucket, step: int, *, add: bool = False) -> None:
        return None

    def update(self, bucket: Bucket, gradients: Payload) -> None:
        return None


class SmallMemory:
    """A few whole numbers per layer. The optimizer subtracts the gradients themselves, so all arithmetic is exact in any order.

    (The optimizer has no momentum, not even 0, so that nothing adapts its learning rate to asynchrony:
    `zmqtrain.exchange.look_ahead.has_rule`.)

    With gossip and averaging only the mean over all groups is a whole number, and it is exact only to float64.
    """

    optimizer = OptimizerSpec("torch.optim:SGD", ({"lr": 1.0},))

    def __init__(self, profile: Profile, rank: int, factor: int, *, whole: bool = True, first: bool | None = None) -> None:
        """``factor``: see `gradient_factor`. ``whole``: whether parameters are whole numbers. ``first``: whether the run may begin
        with this worker's parameters, by default with those of rank 0."""
        self._first = rank == 0 if first is None else first
        self._rank, self._factor, self._whole = rank, factor, whole
        self.place: Callable[[int], tuple[int, int]] = lambda step: (rank, step)
        """The rank and the step whose gradient this worker computes at a step."""
        self.spans: Callable[[int], Sequence[Span]] | None = None
        """If set: the samples whose gradients this worker computes at a step, by their positions in the run."""
        self._layers = {layer.name: (index, small_numel(layer.numel)) for index, layer in enumerate(profile.layers)}

    def payload(self, plan: BucketPlan, *, parameters: bool) -> TensorPayload:
        numel = sum(self._layers[name][1] for name in plan.names)
        # Others begin with the parameters of the first, so a part that the exchange does not overwrite is noticed.
        unset = 0.0 if self._first or not parameters else np.nan
        return TensorPayload.of(np.full(numel, unset))

    def backward(self, bucket: Bucket, step: int, *, add: bool = False) -> None:
        gradients = numbers_of(bucket.gradients)
        for name, part in self._parts(bucket):
            index, numel = self._layers[name]
            before = gradients[part] if add else 0.0
            gradients[part] = before + self._factor * self._gradient(step, index, numel)

    def _gradient(self, step: int, layer: int, numel: int) -> Numbers:
        if self.spans is not None:
            return gradient_of_samples(self.spans(step), layer, numel)
        return gradient(*self.place(step), layer, numel)

    def update(self, bucket: Bucket, gradients: Payload) -> None:
        parameters = numbers_of(bucket.parameters)
        parameters -= numbers_of(gradients)
        if self._whole:
            # A sum was multiplied by 1/n for some number of groups n. That is inexact, but the true result is a whole number.
            np.rint(parameters, out=parameters)

    def values(self, buckets: Sequence[Bucket]) -> dict[str, Numbers]:
        """Each layer's parameters, by the layer's name: one dimension, float64."""
        return {name: numbers_of(bucket.parameters)[part].copy() for bucket in buckets for name, part in self._parts(bucket)}

    def _parts(self, bucket: Bucket) -> list[tuple[str, slice]]:
        """The slice of each layer in the bucket."""
        parts, start = [], 0
        for name in bucket.names:
            numel = self._layers[name][1]
            parts.append((name, slice(start, start + numel)))
            start += numel
        return parts


def make_memory(
    kind: PayloadKind, profile: Profile, topology: Topology, rank: int, arena: Arena | None = None, *, late: bool = False
) -> Memory:
    """The memory of the worker of this rank. ``late``: it joins a run in progress."""
    if kind == "phantom":
        return NoMemory.phantom(profile.optimizer)
    if kind == "real":
        return NoMemory.real(profile.optimizer, arena)
    whole = topology.exchange.kind not in ("gossip", "averaging")
    # If rank 0 is lost at the start, the run begins with those of another one.
    return SmallMemory(profile, rank, gradient_factor(topology), whole=whole, first=(rank == 0 or topology.elastic) and not late)


def small_numel(numel: int) -> int:
    """The number of elements that represent a layer of ``numel`` elements."""
    return min(numel, SMALL)


def gradient(rank: int, step: int, layer: int, numel: int) -> Numbers:
    """A worker's own gradient of a layer, given by its index in the profile: ``numel`` whole numbers from 1 to `LARGEST`, float64.

    Each element has another period in steps and in ranks, so losing one gradient and doubling another gives a wrong sum.
    The caller must not write to it: others get the same.
    """
    return _one_gradient(rank, step, layer, numel)


@lru_cache(KEPT)
def _one_gradient(rank: int, step: int, layer: int, numel: int) -> Numbers:
    """A worker computes it, and then the auditor, once for each server and each copy of a shard."""
    one = _gradients(np.array([rank]), np.array([step]), layer, numel)
    one.flags.writeable = False
    return one


def gradient_of_samples(spans: Sequence[Span], layer: int, numel: int) -> Numbers:
    """The sum of the gradients of samples, given by their positions in the run. The caller must not write to it."""
    return _one_sum(tuple((start, stop) for start, stop in spans), layer, numel)


@lru_cache(KEPT)
def _one_sum(spans: tuple[Span, ...], layer: int, numel: int) -> Numbers:
    places = np.concatenate([np.arange(start, stop) for start, stop in spans])
    total = _sum_of(places, places // _PLACES, layer, numel)
    total.flags.writeable = False
    return total


def gradient_factor(topology: Topology) -> int:
    """The factor on workers' own gradients: the number of groups if their mean is taken, so that the mean is a whole number."""
    exchange = topology.exchange
    if exchange.kind == "model_server" and exchange.policy != "sync":
        return 1
    groups = topology.compute.groups
    return groups * (exchange.every_steps(groups) if exchange.kind == "allreduce" else 1)


def exact(topology: Topology) -> bool:
    """Whether `expected_parameters` is known: no clipping, no compression that rounds the groups' gradients, and no steps whose
    number of samples follows that of the workers."""
    exchange = topology.exchange
    if topology.job.on_resize != "keep":
        return False
    if (exchange.kind == "gossip" and not exchange.gossip.balanced) or (
        exchange.kind == "averaging" and exchange.averaging != type(exchange.averaging)()
    ):
        return False
    size = topology.compute.group_size if not divided(topology) else topology.compute.batch_size
    largest = LARGEST * size * gradient_factor(topology)
    if exchange.kind == "allreduce" and exchange.compression != "none":  # the mean is rounded, too
        return False
    digits = {"none": 53, "fp16": 11, "bf16": 8}.get(exchange.compression, 0)
    return largest <= 2**digits and not topology.optimizer.clip_norm


def expected_parameters(profile: Profile, topology: Topology, steps: int) -> dict[str, Numbers]:
    """The small parameters of each layer after ``steps`` steps of all workers, if `exact` says that they are known.

    With synchronous exchanges these are the replicas' parameters. With asynchronous ones they are the servers' parameters, in any
    order of updates (a worker has what it read last). With gossip and averaging they are the replicas' mean, with which a run ends.
    """
    compute, exchange = topology.compute, topology.exchange
    if exchange.kind == "allreduce":
        steps -= steps % exchange.every_steps(compute.groups)  # steps after the last exchange are never applied
    layers = [(layer.name, index, small_numel(layer.numel)) for index, layer in enumerate(profile.layers) if layer.numel]
    if divided(topology):
        all_samples = [(0, steps * compute.groups * compute.batch_size)]
        return {name: -gradient_of_samples(all_samples, index, numel) for name, index, numel in layers}
    ranks = np.arange(compute.workers)
    return {name: -_gradients(ranks, np.arange(steps), index, numel) for name, index, numel in layers}


def divided(topology: Topology) -> bool:
    """Whether each worker's gradient is that of its samples, which depend on who is there (`zmqtrain.data.division`,
    `zmqtrain.data.teams`)."""
    teams = topology.exchange.kind != "allreduce" and topology.compute.group_size > 1
    return topology.elastic and (topology.exchange.kind == "allreduce" or teams)


def differences(found: Mapping[str, Numbers], expected: Mapping[str, Numbers]) -> str | None:
    """What is wrong with the small parameters of a replica, or of parts of layers; None if they are as expected."""
    for name, values in found.items():
        # Averages of models are not quite exact, but whole numbers can still be told apart.
        if not np.array_equal(np.rint(values), expected[name]):
            return f"{name} holds {values.tolist()} instead of {expected[name].tolist()}"
    return None


def wrong_pieces(profile: Profile, topology: Topology, steps: int, pieces: Mapping[int, tuple[Piece, Payload]]) -> str | None:
    """What is wrong with the small parameters that a model server holds after ``steps`` steps of all workers; None if nothing.

    ``pieces``: the pieces by number, as `zmqtrain.server.model_server` reports them as ``held``."""
    if not exact(topology):
        return None
    expected = expected_parameters(profile, topology, steps)
    buckets = profile.bucket_plans(BucketLimit.of(topology))
    found, wanted = {}, {}
    for index, (piece, payload) in pieces.items():
        names = buckets[piece.bucket].names
        key = f"piece {index} ({', '.join(names)})"
        found[key] = numbers_of(payload)
        wanted[key] = np.concatenate([expected[name] for name in names])[piece.start : piece.stop]
    return differences(found, wanted)


def numbers_of(payload: Payload) -> Numbers:
    """The array, float64, behind a small payload."""
    assert isinstance(payload, TensorPayload)
    return payload.numpy()


#: Samples whose places count as their ranks; then the next step begins. Prime, so that samples rarely look alike.
_PLACES = 97
#: Periods of the elements in ranks, steps and layers; the factors are prime to them.
_PERIODS = np.array([13, 11, 7, 5, 13, 11, 7, 5])
_OF_RANK = np.array([3, 5, 2, 1, 7, 3, 4, 2])
_OF_STEP = np.array([5, 3, 4, 3, 2, 7, 3, 1])
_OF_LAYER = np.array([7, 2, 5, 2, 3, 1, 6, 3])


def _gradients(ranks: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], layer: int, numel: int) -> Numbers:
    """The sum of the gradients of all these ranks and steps."""
    periods = _PERIODS[:numel]
    phase = ranks[:, None, None] * _OF_RANK[:numel] + steps[None, :, None] * _OF_STEP[:numel] + layer * _OF_LAYER[:numel]
    total: Numbers = (1.0 + phase % periods).sum(axis=(0, 1))
    return total


def _sum_of(ranks: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], layer: int, numel: int) -> Numbers:
    """The sum of the gradients of each rank at its step."""
    phase = ranks[:, None] * _OF_RANK[:numel] + steps[:, None] * _OF_STEP[:numel] + layer * _OF_LAYER[:numel]
    total: Numbers = (1.0 + phase % _PERIODS[:numel]).sum(axis=0)
    return total


def _zeros(arena: Arena | None, numel: int, dtype: str) -> Payload:
    if arena is None:
        payload = TensorPayload.empty(numel, dtype)
    else:
        block = arena.allocate(numel * dtype_named(dtype).itemsize, "a bucket of the model")
        payload = TensorPayload.received(block.memory, dtype, (numel,))
    for frame in payload.frames():
        np.frombuffer(frame, np.uint8)[:] = 0
    return payload
