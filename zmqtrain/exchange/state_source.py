"""How a worker that joins late takes over the state of a neighbour: parameters, what the exchange keeps beside them, the
optimizer's state and the model's buffers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.base import Replica
from zmqtrain.exchange.checkpoint_part import copy_of_received, pack_manifest, unpack_manifest
from zmqtrain.exchange.members import Members
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Payload, Value

_METHOD = "exchange.state"
_PARAMETERS, _EXCHANGE, _BESIDE = "parameters", "exchange", "beside"


class StateSource:
    """Collects requests for this worker's state. They are answered before the first step of the worker that has asked, so that it
    begins with what the others begin with."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._open = False
        self.wanted: dict[PeerId, int] = {}  # who asked -> which of its processes

    def serve(self) -> None:
        """Accept requests from now on."""
        self._open = True
        self._endpoint.serve(_METHOD, self._note)

    def due(self, step: int, members: Members) -> list[PeerId]:
        """Those who asked, and train ``step``, of which it is known who trains it. None of them has been given anything."""
        return [peer for peer, incarnation in self.wanted.items() if members.incarnation(peer, step) == incarnation]

    async def answer(
        self,
        step: int,
        members: Members,
        replica: Replica,
        settle: Callable[[], Awaitable[None]],
        own: Callable[[], Mapping[str, Payload]] = dict,
    ) -> None:
        """Give the state with which ``step`` begins to those who have asked for it, and begin with that step. Before that,
        ``settle()`` waits until nothing is under way; ``own()``: what the exchange keeps, by name."""
        if self.wanted and (due := self.due(step, members)):
            await settle()
            await self.give(due, replica, own())

    async def give(self, peers: Sequence[PeerId], replica: Replica, own: Mapping[str, Payload]) -> None:
        """Send the state to these workers, which have asked for it. Nothing changes it in the meantime."""
        tensors, values = await replica.beside()
        for peer in peers:
            del self.wanted[peer]
            with suppress(PeerLostError):
                await self._give(peer, replica, own, tensors, values)

    def close(self) -> None:
        """Training has ended: refuse later requests."""
        self._open = False
        self.wanted.clear()

    async def _note(self, caller: PeerId, incarnation: Value) -> Value:
        if not isinstance(incarnation, int):
            raise ProtocolError(f"{caller} asked for the state as process {incarnation!r:.60}, which must be a whole number")
        if self._open:
            self.wanted[caller] = incarnation
        return self._open

    async def _give(
        self,
        peer: PeerId,
        replica: Replica,
        own: Mapping[str, Payload],
        tensors: Mapping[str, Payload],
        values: Mapping[str, Value],
    ) -> None:
        send = self._endpoint.send
        async with in_time(peer, "it to take the state that it has asked for", self._timeout_s):
            await send(peer, (_METHOD,), pack_manifest(tensors, {_EXCHANGE: list(own), _BESIDE: dict(values)}))
            for bucket in replica.buckets:
                # The next step updates the parameters while they are still being sent.
                await send(peer, (_METHOD, _PARAMETERS, bucket.index), _copied(bucket.parameters))
            for name, payload in own.items():
                await send(peer, (_METHOD, _EXCHANGE, name), _copied(payload))
            for name, payload in tensors.items():
                await send(peer, (_METHOD, _BESIDE, name), payload)


class NeighboursState:
    """Another worker's state, for one that joins late."""

    def __init__(self, endpoint: Endpoint, source: PeerId, *, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self.source = source
        """The worker whose state it is."""

    @classmethod
    def of_column(cls, endpoint: Endpoint, column: Sequence[PeerId], *, timeout_s: float) -> NeighboursState:
        """That of the member before this one in ``column``. Raises `PeerLostError` if there is no other."""
        neighbour = column[column.index(endpoint.peer) - 1]
        if neighbour == endpoint.peer:
            raise PeerLostError("worker", "no other worker is left", waiting_for="a neighbour's state")
        return cls(endpoint, neighbour, timeout_s=timeout_s)

    async def join(self, members: Members) -> int:
        """Ask for the state with which this worker's first step begins, and take part from that step on. Returns it; call `take`
        next. Raises `PeerLostError` if the source trains no more."""
        # Asked before the others know of this worker: later the source might be past this worker's first step when it hears of it.
        incarnation = members.incarnation(self._endpoint.peer, 0)
        assert incarnation is not None
        answer = await self._endpoint.request(self.source, _METHOD, incarnation, timeout=self._timeout_s)
        if answer.meta is not True:
            raise PeerLostError(self.source, "its training has ended", waiting_for="its state: it is too late to join")
        return await members.join()

    async def take(self, replica: Replica, own: Callable[[str], Payload | None] = lambda name: None) -> None:
        """Wait for the state, and write it to ``replica``. ``own(name)``: where something that the exchange keeps belongs. Raises
        `PeerLostError`, `PeerTimeoutError`, and `ProtocolError` if the source has something else."""
        listed, about = unpack_manifest(await self._receive((_METHOD,), None))
        for bucket in replica.buckets:
            await self._receive((_METHOD, _PARAMETERS, bucket.index), bucket.parameters)
        for name in about[_EXCHANGE]:
            into = own(str(name))
            if into is None:
                raise ProtocolError(f"{self.source} keeps {name!r:.60} beside its parameters, but this worker does not")
            await self._receive((_METHOD, _EXCHANGE, str(name)), into)
        # Copied, since the transport may own what it has received.
        tensors = {name: copy_of_received(await self._receive((_METHOD, _BESIDE, name), None), shape) for name, _, shape in listed}
        await replica.take_beside(tensors, about[_BESIDE])
        for bucket in replica.buckets:
            replica.parameters_ready(bucket)

    async def _receive(self, tag: tuple[str | int, ...], into: Payload | None) -> Payload:
        async with in_time(self.source, f"its {'/'.join(map(str, tag))}", self._timeout_s):
            return await self._endpoint.receive(self.source, tag, into=into)


def _copied(payload: Payload) -> Payload:
    copied = payload.empty_like()
    copied.copy_(payload)
    return copied
