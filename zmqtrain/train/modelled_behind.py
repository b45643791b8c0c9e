"""What a modelled worker has the FC server compute between its forward and its backward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import numpy as np

from zmqtrain.exchange.fc_client import FcClient
from zmqtrain.exchange.fc_messages import ActivationsMeta
from zmqtrain.membership.context import RoleContext
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import SMALL
from zmqtrain.train.device.modelled import Waited
from zmqtrain.train.device.profile import Profile
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

#: Makes a payload of so many elements of a dtype.
MakePayload: TypeAlias = Callable[[int, str], Payload]


class BehindWorker:
    """Implements `zmqtrain.train.device.modelled.Behind`: as many bytes go out and come back as the profile's activations have."""

    def __init__(self, client: FcClient, profile: Profile, make: MakePayload, divisor: int) -> None:
        """``profile``: the worker's own; ``make`` makes payloads; ``divisor``: samples of the group's batch."""
        self.client = client
        self._last, self._make, self._divisor = profile.layers[-1], make, divisor

    @classmethod
    def of(cls, context: RoleContext, profile: Profile) -> BehindWorker:
        """A worker's. On the loop's thread."""
        client = FcClient(context.endpoint, context.placement.fc_roles[0].peer, context.ladder)
        return cls(client, profile, payloads_of(context.topology), context.topology.compute.batch_size)

    async def __call__(self, step: int, samples: int, sent: Callable[[], Awaitable[None]]) -> Waited:
        clock = asyncio.get_running_loop().time
        start = clock()
        numel = samples * self._last.activation_numel
        activations, gradients = (self._make(numel, self._last.dtype) for _ in range(2))
        meta = ActivationsMeta(2, (True,), samples, divisor=float(self._divisor))
        answer = await self.client.train(step, 0, meta, [activations, self._make(samples, "int64")], [gradients], sent)
        seconds = clock() - start
        return Waited(seconds, max(0.0, seconds - answer.compute_s))


def payloads_of(topology: Topology) -> MakePayload:
    """Payloads of modelled devices, as ``[simulation] payload`` says."""
    return {"phantom": PhantomPayload, "small": _small}.get(topology.simulation.payload or "real", _zeros)


def _zeros(numel: int, dtype: str) -> Payload:
    payload = TensorPayload.empty(numel, dtype)
    for frame in payload.frames():
        np.frombuffer(frame, np.uint8)[:] = 0
    return payload


def _small(numel: int, dtype: str) -> Payload:
    return _zeros(min(numel, SMALL), dtype)
