"""The FC server's layers on a modelled device: they take the time that the profile says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zmqtrain.errors import ProtocolError
from zmqtrain.membership.context import RoleContext
from zmqtrain.server.fc_queue import Applied, Turn
from zmqtrain.server.fc_server import Part, State, Trained
from zmqtrain.train.device.noise import Noise
from zmqtrain.train.device.parts import fc_profile
from zmqtrain.train.device.profile import Profile


class ModelledHead:
    """Implements `zmqtrain.server.fc_server.Head` by waiting. Gradients are as large as what came."""

    def __init__(self, profile: Profile, tempo: Callable[[int], float]) -> None:
        """``tempo(turn)``: how many times as long work takes that begins now."""
        self._profile, self._tempo = profile, tempo
        self._turns = 0

    @classmethod
    def of(cls, context: RoleContext) -> ModelledHead:
        """The head of an FC server, as the topology describes it. Raises `UsageError` where its profile cannot be used."""
        compute, seed = context.topology.compute, context.topology.job.seed
        noise = Noise(compute.noise.kind, compute.noise.spread, compute.noise.straggler_chance, compute.noise.straggler_factor)
        number = context.placement.world_size + context.role.index
        return cls(fc_profile(context.topology), lambda turn: noise.factor(seed, number, turn) * context.slowdown())

    async def train(self, turn: Turn, parts: Sequence[Part]) -> Trained:
        self._turns += 1
        samples = sum(part.meta.samples for part in parts)
        seconds = self._profile.step_s * self._profile.scaled(samples) * self._tempo(self._turns)
        await asyncio.sleep(seconds)
        gradients = (
            tuple(each.empty_like() for each, wanted in zip(part.tensors, part.meta.wanted, strict=False) if wanted)
            for part in parts
        )
        return Trained(None, seconds, tuple(gradients))

    async def update(self, applied: Applied) -> None:
        await asyncio.sleep(self._profile.update_s * self._tempo(self._turns))

    async def evaluate(self, part: Part) -> list[float]:
        raise ProtocolError("modelled devices evaluate by themselves")

    async def state(self) -> State:
        return State({}, {}, {})
