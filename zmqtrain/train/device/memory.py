"""What the buckets of a modelled replica hold: sizes, zeros in full size, or a few numbers whose end can be told beforehand.

========  =============================================  ===========================  ==========================================
kind      a bucket's payload                             the network carries          for
========  =============================================  ===========================  ==========================================
phantom   a size                                         the sizes, nothing else      large simulated worlds
real      zeros, in full                                 all bytes                    real and emulated worlds
small     up to 8 whole numbers a layer, in float64      far less than a real model   checking that nothing is lost or doubled
========  =============================================  ===========================  ==========================================

With ``small`` the buckets are those of the real model, but hold next to nothing: times and bytes on the network mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from zmqtrain.arena.arena import Arena
from zmqtrain.exchange.base import Bucket, OptimizerSpec
from zmqtrain.exchange.pieces import Piece
from zmqtrain.topology.schema import Topology
from zmqtrain.train.buckets import BucketPlan
from zmqtrain.train.device.profile import Profile
from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

PayloadKind = Literal["phantom", "small", "real"]
Numbers = npt.NDArray[np.float64]

#: Elements that stand for a layer in small payloads: enough to be cut between workers and servers.
SMALL = 8
#: The largest element of a worker's own small gradient, before it is multiplied by the number of groups.
LARGEST = 13


class Memory(Protocol):
    """Makes and fills the payloads of one replica."""

    optimizer: OptimizerSpec
    """What servers run on the parameters."""

    def payload(self, plan: BucketPlan, *, parameters: bool) -> Payload:
        """A bucket's parameters, or its gradients."""
        ...

    def backward(self, bucket: Bucket, step: int, *, add: bool = False) -> None:
        """Write this worker's gradient of the step, or add it."""
        ...

    def update(self, bucket: Bucket, gradients: Payload) -> None:
        """Run the local optimizer on the bucket's parameters, by ``gradients``."""
        ...


class NoMemory:
    """Payloads that are never looked into: phantoms, or zeros in full size."""

    def __init__(self, optimizer: OptimizerSpec, make: Callable[[int, str], Payload]) -> None:
        self.optimizer = optimizer
        self._make = make

    @classmethod
    def phantom(cls, optimizer: OptimizerSpec) -> NoMemory:
        """Sizes only."""
        return cls(optimizer, PhantomPayload)

    @classmethod
    def real(cls, optimizer: OptimizerSpec, arena: Arena | None = None) -> NoMemory:
        """Zeros, in the memory that the host's processes share where there is any."""
        return cls(optimizer, partial(_zeros, arena))

    def payload(self, plan: BucketPlan, *, parameters: bool) -> Payload:
        return self._make(plan.numel, plan.dtype)

    def backward(self, bucket: Bucket, step: int, *, add: bool = False) -> None:
        return None

    def update(self, bucket: Bucket, gradients: Payload) -> None:
        return None


class SmallMemory:
    """A few whole numbers a layer. The optimizer subtracts gradients as they are, so all arithmetic is exact, in any order.

    (It names no momentum, not even 0, so nothing fits its rate to asynchrony: `zmqtrain.exchange.look_ahead.has_rule`.)

    With gossip only the mean over all groups is a whole number, and no more exact than float64 is.
    """

    optimizer = OptimizerSpec("torch.optim:SGD", ({"lr": 1.0},))

    def __init__(self, profile: Profile, rank: int, factor: int, *, whole: bool = True) -> None:
        """``factor``: see `gradient_factor`; ``whole``: whether parameters are whole numbers."""
        self._rank, self._factor, self._whole = rank, factor, whole
        self._layers = {layer.name: (index, small_numel(layer.numel)) for index, layer in enumerate(profile.layers)}

    def payload(self, plan: BucketPlan, *, parameters: bool) -> TensorPayload:
        numel = sum(self._layers[name][1] for name in plan.names)
        # All begin with the parameters of rank 0. Whatever is not replaced by them shows.
        unset = 0.0 if self._rank == 0 or not parameters else np.nan
        return TensorPayload.of(np.full(numel, unset))

    def backward(self, bucket: Bucket, step: int, *, add: bool = False) -> None:
        gradients = numbers_of(bucket.gradients)
        for name, part in self._parts(bucket):
            index, numel = self._layers[name]
            before = gradients[part] if add else 0.0
            gradients[part] = before + self._factor * gradient(self._rank, step, index, numel)

    def update(self, bucket: Bucket, gradients: Payload) -> None:
        parameters = numbers_of(bucket.parameters)
        parameters -= numbers_of(gradients)
        if self._whole:
            # Sums were multiplied by one over a number of groups. That is not exact, but what comes of it is a whole number.
            np.rint(parameters, out=parameters)

    def values(self, buckets: Sequence[Bucket]) -> dict[str, Numbers]:
        """Each layer's parameters."""
        return {name: numbers_of(bucket.parameters)[part].copy() for bucket in buckets for name, part in self._parts(bucket)}

    def _parts(self, bucket: Bucket) -> list[tuple[str, slice]]:
        """Where in the bucket each layer lies."""
        parts, start = [], 0
        for name in bucket.names:
            numel = self._layers[name][1]
            parts.append((name, slice(start, start + numel)))
            start += numel
        return parts


def make_memory(kind: PayloadKind, profile: Profile, topology: Topology, rank: int, arena: Arena | None = None) -> Memory:
    """The memory of the worker of this rank."""
    if kind == "phantom":
        return NoMemory.phantom(profile.optimizer)
    if kind == "real":
        return NoMemory.real(profile.optimizer, arena)
    return SmallMemory(profile, rank, gradient_factor(topology), whole=topology.exchange.kind != "gossip")


def small_numel(numel: int) -> int:
    """Elements that stand for a layer of so many."""
    return min(numel, SMALL)


def gradient(rank: int, step: int, layer: int, numel: int) -> Numbers:
    """A worker's own gradient of a layer (by its place in the profile): whole numbers from 1 to `LARGEST`.

    Each element repeats after another number of steps and ranks, so that to lose one gradient and to double another shows.
    """
    return _gradients(np.array([rank]), np.array([step]), layer, numel)


def gradient_factor(topology: Topology) -> int:
    """By what workers multiply their own gradients: where the groups' mean is taken, their number, so that it is a whole number."""
    exchange = topology.exchange
    if exchange.kind == "model_server" and exchange.policy != "sync":
        return 1
    groups = topology.compute.groups
    return groups * (exchange.every_steps(groups) if exchange.kind == "allreduce" else 1)


def exact(topology: Topology) -> bool:
    """Whether `expected_parameters` can be told: no clipping, and no compression that rounds the group's gradients."""
    exchange = topology.exchange
    if (exchange.kind == "gossip" and not exchange.gossip.balanced) or (
        exchange.kind == "averaging" and exchange.averaging != type(exchange.averaging)()
    ):
        return False
    largest = LARGEST * topology.compute.group_size * gradient_factor(topology)
    digits = {"none": 53, "fp16": 11, "bf16": 8}.get(exchange.compression if exchange.kind == "model_server" else "none", 0)
    return largest <= 2**digits and not topology.optimizer.clip_norm


def expected_parameters(profile: Profile, topology: Topology, steps: int) -> dict[str, Numbers]:
    """What the small parameters of each layer are after ``steps`` steps of all workers, where `exact` says that this is known.

    With synchronous exchanges the replicas hold them, with asynchronous ones the servers, whatever the order was (a worker has what
    it read last); with gossip and averaging they are the replicas' mean, with which a run ends.
    """
    compute, exchange = topology.compute, topology.exchange
    if exchange.kind == "allreduce":
        steps -= steps % exchange.every_steps(compute.groups)  # steps left over are never applied
    ranks = np.arange(compute.workers)
    return {
        layer.name: -_gradients(ranks, np.arange(steps), index, small_numel(layer.numel))
        for index, layer in enumerate(profile.layers)
        if layer.numel
    }


def differences(found: Mapping[str, Numbers], expected: Mapping[str, Numbers]) -> str | None:
    """What is wrong with the small parameters of a replica, or of parts of layers; None where all is as it must be."""
    for name, values in found.items():
        # Averages of models are not quite exact; whole numbers are told apart all the same.
        if not np.array_equal(np.rint(values), expected[name]):
            return f"{name} holds {values.tolist()} instead of {expected[name].tolist()}"
    return None


def wrong_pieces(profile: Profile, topology: Topology, steps: int, pieces: Mapping[int, tuple[Piece, Payload]]) -> str | None:
    """What is wrong with the small parameters that a model server holds after ``steps`` steps of all workers. ``pieces``: what
    `zmqtrain.server.model_server` states as ``held``."""
    if not exact(topology):
        return None
    expected = expected_parameters(profile, topology, steps)
    buckets = profile.bucket_plans(topology.compute.bucket_bytes)
    found, wanted = {}, {}
    for index, (piece, payload) in pieces.items():
        names = buckets[piece.bucket].names
        key = f"piece {index} ({', '.join(names)})"
        found[key] = numbers_of(payload)
        wanted[key] = np.concatenate([expected[name] for name in names])[piece.start : piece.stop]
    return differences(found, wanted)


def numbers_of(payload: Payload) -> Numbers:
    """The memory of a small payload."""
    assert isinstance(payload, TensorPayload)
    return payload.numpy()


#: Elements repeat after so many ranks, steps or layers; the factors are prime to them.
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


def _zeros(arena: Arena | None, numel: int, dtype: str) -> Payload:
    if arena is None:
        payload = TensorPayload.empty(numel, dtype)
    else:
        block = arena.allocate(numel * dtype_named(dtype).itemsize, "a bucket of the model")
        payload = TensorPayload.received(block.memory, dtype, (numel,))
    for frame in payload.frames():
        np.frombuffer(frame, np.uint8)[:] = 0
    return payload
