"""How a worker that joins late gets the weights of a neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.base import Replica
from zmqtrain.exchange.members import Members
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Value

_METHOD = "gossip.weights"


class StateSource:
    """Collects requests for this worker's weights. They are answered before the first step of the worker that has asked, so that
    it begins with what the others begin with."""

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

    async def give(self, peers: Sequence[PeerId], replica: Replica) -> None:
        """Send the parameters to these workers, which have asked for them. Nothing changes the parameters in the meantime."""
        for peer in peers:
            del self.wanted[peer]
            with suppress(PeerLostError):
                await self._give(peer, replica)

    def close(self) -> None:
        """Training has ended: refuse later requests."""
        self._open = False
        self.wanted.clear()

    async def _note(self, caller: PeerId, incarnation: Value) -> Value:
        if not isinstance(incarnation, int):
            raise ProtocolError(f"{caller} asked for weights as process {incarnation!r:.60}, which must be a whole number")
        if self._open:
            self.wanted[caller] = incarnation
        return self._open

    async def _give(self, peer: PeerId, replica: Replica) -> None:
        async with in_time(peer, "it to take the weights that it has asked for", self._timeout_s):
            for bucket in replica.buckets:
                # The next step updates the parameters while they are still being sent.
                copied = bucket.parameters.empty_like()
                copied.copy_(bucket.parameters)
                await self._endpoint.send(peer, (_METHOD, bucket.index), copied)


class Weights:
    """Another worker's parameters, for one that joins late."""

    def __init__(self, endpoint: Endpoint, source: PeerId, *, timeout_s: float) -> None:
        self._endpoint, self._source, self._timeout_s = endpoint, source, timeout_s

    async def ask(self, incarnation: int) -> None:
        """Ask for the parameters with which this worker's first step begins. ``incarnation``: which of its processes this is.
        Raises `PeerLostError` if the source trains no more."""
        answer = await self._endpoint.request(self._source, _METHOD, incarnation, timeout=self._timeout_s)
        if answer.meta is not True:
            raise PeerLostError(self._source, "its training has ended", waiting_for="its weights: it is too late to join")

    async def take(self, replica: Replica) -> None:
        """Wait for the weights, and write them to ``replica``. Raises `PeerLostError` and `PeerTimeoutError`."""
        for bucket in replica.buckets:
            async with in_time(self._source, f"its weights of bucket {bucket.index}", self._timeout_s):
                await self._endpoint.receive(self._source, (_METHOD, bucket.index), into=bucket.parameters)
            replica.parameters_ready(bucket)
