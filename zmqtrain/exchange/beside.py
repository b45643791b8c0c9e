"""What a worker has beside its parameters (the model's buffers), given to workers that come late, with model servers.

A worker gives it at the end of a step, or at once if it trains none: in between, the step's forward changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.base import Replica
from zmqtrain.exchange.checkpoint_part import copy_of_received, pack_manifest, unpack_manifest
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Payload, Value

_METHOD = "model_server.beside"


class Beside:
    """One worker's side, which asks and answers."""

    def __init__(self, endpoint: Endpoint, replica: Replica, begun: Callable[[], bool], *, late: bool, timeout_s: float) -> None:
        """``begun()``: whether this worker has parameters. ``late``: it does not begin with the run."""
        self._endpoint, self._replica, self._begun, self._timeout_s = endpoint, replica, begun, timeout_s
        self._late = late
        self._asked: list[PeerId] = []  # workers that wait for the end of the step
        self.rests = False
        """It trains no step now."""
        endpoint.serve(_METHOD, self._on_asked)

    async def take(self, peers: Sequence[PeerId]) -> None:
        """Begin with what the first of ``peers`` has that has begun itself; with nothing, if none has, but one begins with the run.

        Raises `PeerLostError` if there is something to take, and nobody is left who has it."""
        first = False
        for peer in peers:
            if peer == self._endpoint.peer:
                continue
            with suppress(PeerLostError):
                answer = await self._endpoint.request(peer, _METHOD, timeout=self._timeout_s)
                if answer.meta is not True:
                    first = first or answer.meta is False
                    continue
                listed, about = unpack_manifest(await self._receive(peer, (_METHOD,)))
                tensors = {name: copy_of_received(await self._receive(peer, (_METHOD, name)), shape) for name, _, shape in listed}
                await self._replica.take_beside(tensors, about)
                return
        if first:
            return
        missed = [name for part in await self._replica.beside() for name in part]
        if missed:
            named = ", ".join(missed[:3])
            why = f"none is left that has what servers do not keep: {named}, ..."
            raise PeerLostError("the other workers", why, waiting_for="the buffers of the model")

    async def give(self) -> None:
        """A step has ended: answer those that have asked meanwhile."""
        if self._asked:
            asked, self._asked = self._asked, []
            await self._give(asked)

    async def _receive(self, peer: PeerId, tag: Tag) -> Payload:
        async with in_time(peer, "the buffers of its model", self._timeout_s):
            return await self._endpoint.receive(peer, tag)

    async def _on_asked(self, caller: PeerId) -> Value:
        """Whether it will give something; ``None``: it has come late itself, and has nothing yet."""
        if not self._begun():
            return None if self._late else False
        if self.rests:
            await self._give([caller])
        else:
            self._asked.append(caller)
        return True

    async def _give(self, peers: Sequence[PeerId]) -> None:
        tensors, values = await self._replica.beside()
        for peer in peers:
            with suppress(PeerLostError):
                await self._endpoint.send(peer, (_METHOD,), pack_manifest(tensors, values))
                for name, payload in tensors.items():
                    await self._endpoint.send(peer, (_METHOD, name), payload)
