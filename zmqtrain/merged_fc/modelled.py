"""Merged layers on modelled devices: what a worker sends and waits for, and an FC server that takes the time of the profile.

If several FC servers divide the layers, each takes its share of the time, and between two layers they exchange what divided linear
layers do (`zmqtrain.parallel.model.linear`): outputs are gathered, and their gradients summed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_gather, all_reduce, reduce_scatter
from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.merged_fc.client import FcClient
from zmqtrain.merged_fc.executor import BatchPart, ExecutorState, Trained
from zmqtrain.merged_fc.messages import ActivationsMeta
from zmqtrain.merged_fc.profile_phases import fc_profile
from zmqtrain.merged_fc.queue import Applied, Turn
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import SMALL
from zmqtrain.train.device.modelled import Waited
from zmqtrain.train.device.noise import Noise
from zmqtrain.train.device.profile import Layer, Profile
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

#: Makes a payload with this number of elements of a dtype.
MakePayload: TypeAlias = Callable[[int, str], Payload]


class ModelledLayers:
    """Implements `zmqtrain.train.remote_layers.ModelledRemoteLayers`: as many bytes are sent and received as the profile's
    activations have."""

    def __init__(self, client: FcClient, profile: Profile, make: MakePayload, divisor: int) -> None:
        """``profile``: the worker's own; ``make`` makes payloads; ``divisor``: samples of the group's batch."""
        self._client = client
        self._last, self._make, self._divisor = profile.layers[-1], make, divisor

    @classmethod
    def of(cls, context: RoleContext, profile: Profile, members: Members) -> ModelledLayers:
        """The layers of a worker. Called on the loop's thread."""
        return cls(FcClient.of(context, members), profile, payloads_of(context.topology), context.topology.compute.batch_size)

    def begin_step(self, step: int) -> None:
        self._client.begin_step(step)

    async def __call__(self, step: int, samples: int, sent: Callable[[], Awaitable[None]]) -> Waited:
        clock = asyncio.get_running_loop().time
        start = clock()
        numel = samples * self._last.activation_numel
        activations, gradients = (self._make(numel, self._last.dtype) for _ in range(2))
        meta = ActivationsMeta(2, (True,), samples, divisor=float(self._divisor))
        answer = await self._client.train(step, 0, meta, [activations, self._make(samples, "int64")], [gradients], sent)
        seconds = clock() - start
        return Waited(seconds, max(0.0, seconds - answer.compute_s))

    async def close(self) -> None:
        await self._client.finish()


class ModelledExecutor:
    """Implements `zmqtrain.merged_fc.executor.Executor` by waiting. Gradients have the size of the activations."""

    def __init__(self, profile: Profile, speed_factor: Callable[[int], float], group: Group, make: MakePayload) -> None:
        """``speed_factor(turn)``: the factor on the time of work that begins now. ``group``: all FC servers. ``make`` makes what
        they send."""
        self._profile, self._speed_factor, self._group, self._make = profile, speed_factor, group, make
        self._stages = tuple(_stages(profile.layers))
        self._turns = 0

    @classmethod
    def of(cls, context: RoleContext) -> ModelledExecutor:
        """The executor of an FC server, as the topology describes it. Raises `UsageError` if its profile cannot be used."""
        compute, seed = context.topology.compute, context.topology.job.seed
        noise = Noise(compute.noise.kind, compute.noise.spread, compute.noise.straggler_chance, compute.noise.straggler_factor)
        number = context.placement.world_size + context.role.index
        peers, index = tuple(role.peer for role in context.placement.fc_roles), context.role.index
        if context.placement.fc_servers == 1:  # the other one has a copy
            peers, index = (context.role.peer,), 0
        group = Group(context.endpoint, peers, index, "fc", timeout_s=context.timeouts.barrier_s)
        return cls(
            fc_profile(context.topology),
            lambda turn: noise.factor(seed, number, turn) * context.slowdown(),
            group,
            payloads_of(context.topology),
        )

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        self._turns += 1
        clock = asyncio.get_running_loop().time
        start, samples = clock(), sum(part.meta.samples for part in parts)
        if self._group.size == 1:
            await self._work(self._profile.step_s, samples)
        else:
            came = sum(tensor.numel for part in parts for tensor in part.tensors[: len(part.meta.wanted)])
            await self._together(samples, came)
        gradients = (
            tuple(each.empty_like() for each, wanted in zip(part.tensors, part.meta.wanted, strict=False) if wanted)
            for part in parts
        )
        return Trained(None, clock() - start, tuple(gradients))

    async def _together(self, samples: int, came: int) -> None:
        """Compute a turn together with the other FC servers. ``came``: the number of elements of the activations."""
        for place, stage in enumerate(self._stages):
            if place:
                await all_gather(self._group, self._between(place, samples), ("gather", self._turns, place))
            await self._work(sum(layer.forward_s for layer in stage), samples)
        for place, stage in reversed(tuple(enumerate(self._stages))):
            await self._work(sum(layer.backward_s for layer in stage), samples)
            if place:
                await reduce_scatter(self._group, self._between(place, samples), ("scatter", self._turns, place))
        await all_reduce(self._group, self._make(came, self._stages[0][0].dtype), ("dx", self._turns))

    def _between(self, place: int, samples: int) -> Payload:
        """What is gathered before a stage: the outputs of the previous stage."""
        last = self._stages[place - 1][-1]
        return self._make(samples * last.activation_numel, last.dtype)

    async def _work(self, seconds: float, samples: int) -> None:
        """Wait for this FC server's share of ``seconds`` of the profile's time."""
        await asyncio.sleep(seconds * self._profile.scaled(samples) * self._speed_factor(self._turns) / self._group.size)

    async def update(self, applied: Applied) -> None:
        await asyncio.sleep(self._profile.update_s * self._speed_factor(self._turns) / self._group.size)

    async def evaluate(self, part: BatchPart) -> list[float]:
        raise ProtocolError("the FC server has a modelled device and cannot evaluate")

    async def state(self) -> ExecutorState:
        return ExecutorState({}, {}, {})

    async def become(self, state: ExecutorState) -> None:
        return None


def payloads_of(topology: Topology) -> MakePayload:
    """A function that makes payloads of modelled devices, as ``[simulation] payload`` says."""
    return {"phantom": PhantomPayload, "small": _small}.get(topology.simulation.payload or "real", _zeros)


def _zeros(numel: int, dtype: str) -> Payload:
    payload = TensorPayload.empty(numel, dtype)
    for frame in payload.frames():
        np.frombuffer(frame, np.uint8)[:] = 0
    return payload


def _small(numel: int, dtype: str) -> Payload:
    return _zeros(min(numel, SMALL), dtype)


def _stages(layers: Sequence[Layer]) -> Iterator[tuple[Layer, ...]]:
    """Layers grouped into stages without a message inside: a stage starts with a layer that has parameters, or with the first."""
    stage: list[Layer] = []
    for layer in layers:
        if stage and layer.numel:
            yield tuple(stage)
            stage = []
        stage.append(layer)
    yield tuple(stage)
