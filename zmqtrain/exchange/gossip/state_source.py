"""How a worker that joins late gets the weights of a neighbour."""

from __future__ import annotations

from contextlib import suppress

from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.base import Replica
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Value

_METHOD = "gossip.weights"


class StateSource:
    """Collects requests for this worker's weights, and answers them between two steps."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._open = False
        self.wanted: list[PeerId] = []

    def serve(self) -> None:
        """Accept requests from now on."""
        self._open = True
        self._endpoint.serve(_METHOD, self._note)

    async def give(self, replica: Replica) -> None:
        """Send the parameters to all workers that asked for them. Nothing changes the parameters in the meantime."""
        wanted, self.wanted = self.wanted, []
        for peer in wanted:
            with suppress(PeerLostError):
                await self._give(peer, replica)

    def close(self) -> None:
        """Training has ended: refuse later requests."""
        self._open = False
        self.wanted.clear()

    async def _note(self, caller: PeerId) -> Value:
        if self._open and caller not in self.wanted:
            self.wanted.append(caller)
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

    async def ask(self) -> None:
        """Ask for the parameters after one of the source's next steps. Raises `PeerLostError` if it trains no more."""
        answer = await self._endpoint.request(self._source, _METHOD, timeout=self._timeout_s)
        if answer.meta is not True:
            raise PeerLostError(self._source, "its training has ended", waiting_for="its weights: it is too late to join")

    async def take(self, replica: Replica) -> None:
        """Wait for the weights, and write them to ``replica``. Raises `PeerLostError` and `PeerTimeoutError`."""
        for bucket in replica.buckets:
            async with in_time(self._source, f"its weights of bucket {bucket.index}", self._timeout_s):
                await self._endpoint.receive(self._source, (_METHOD, bucket.index), into=bucket.parameters)
            replica.parameters_ready(bucket)
