"""The one interface through which roles, exchanges and collectives see the network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeAlias

from zmqtrain.wire.payload import Payload, Value

#: Name of a process on the network, unique in a run: ``worker/3``, ``server/0``, ``agent/alpha``, ``coordinator``.
PeerId: TypeAlias = str
#: What a message is about; sender and receiver must give the same: ``("gradient", step, bucket)``.
Tag: TypeAlias = tuple[str | int, ...]
#: Answers a request. Raising a `ZmqTrainError` answers with that error, which ``request`` raises at the caller.
Handler: TypeAlias = Callable[..., Awaitable["Payload | Value"]]


class Sent(Protocol):
    """A message that was queued for sending."""

    @property
    def released(self) -> bool:
        """Whether the buffer may be written again: the peer's endpoint has acknowledged every byte."""
        ...

    async def wait_released(self) -> None:
        """Wait until ``released``. Raises `PeerLostError` where the peer is lost first (the buffer is free then, too)."""
        ...


class Subscription(Protocol):
    """All messages whose tag begins with one topic, from any peer, in arrival order (per-pair order is kept).

    A message keeps its sender's byte credit until it is taken from here.
    """

    async def get(self) -> tuple[PeerId, Tag, Payload]: ...

    def __aiter__(self) -> AsyncIterator[tuple[PeerId, Tag, Payload]]: ...

    def close(self) -> None: ...


class Endpoint(Protocol):
    """One process's place on the network.

    Messages between two incarnations of two peers arrive exactly once and, for one tag, in order, also when the link between
    them drops and comes back. A peer that stays away longer than the time-out timeouts allows, or comes back as a new process, is
    *lost*: every wait for it raises `PeerLostError`.
    """

    peer: PeerId

    @property
    def address(self) -> str:
        """Where others connect to, to be handed out: ``tcp://10.0.0.1:40001,40002`` or ``memory://worker/3``."""
        ...

    def add_peer(self, peer: PeerId, address: str) -> None:
        """Tell where a peer is. A send to it connects on demand; may be called again with a new address after a restart."""
        ...

    async def send(self, to: PeerId, tag: Tag, payload: Payload, *, priority: int = 0, lasting: bool = False) -> Sent:
        """Queue a message; returns once it is queued under the receiver's byte credit.

        The payload's memory must stay as it is until the returned handle is released (or until a message from the peer proves that
        it has arrived). Higher ``priority`` goes first; messages with one tag keep their order.

        ``lasting``: it stays until the peer has answered that it has *used* it, so a peer that shares the memory need not copy it.
        """
        ...

    async def receive(self, source: PeerId, tag: Tag, *, into: Payload | None = None) -> Payload:
        """The next message with this tag from this peer, whatever else arrived before it.

        Without ``into`` the result may alias the transport's memory: read it, do not write to it, and drop it soon. With ``into``
        the content is written there, and ``into`` (with the message's ``meta``) is returned.
        Raises `PeerLostError`. A second concurrent receive with the same source and tag queues behind the first.
        """
        ...

    def subscribe(self, topic: str) -> Subscription:
        """All messages whose tag begins with ``topic``; those that came earlier are delivered first. One subscriber a topic."""
        ...

    async def request(self, to: PeerId, method: str, *args: Value, timeout: float) -> Payload:
        """Call ``method`` of the peer over the control lane. Raises `PeerTimeoutError`, `PeerLostError`, or what it answered."""
        ...

    def serve(self, method: str, handler: Handler) -> None:
        """Answer requests for ``method`` by ``await handler(caller, *args)``."""
        ...

    def on_lost(self, callback: Callable[[PeerId, str], None]) -> None:
        """Call ``callback(peer, reason)`` whenever a peer is lost: not when it closes after it has finished."""
        ...

    def forget(self, peer: PeerId, reason: str) -> None:
        """Treat the peer as lost now (membership says so); waits for it raise at once, and `on_lost` is called."""
        ...

    def pardon(self, count: int) -> None:
        """``count`` callers will only try whether they get through, and break off before they say anything: no intruders, so no
        warning. For the preflight check, in which each host tries to connect (only this process knows how many will)."""
        ...

    def waits(self) -> list[str]:
        """What this process waits for from others, in words: what is said when a simulated world stands still."""
        ...

    def traffic(self) -> dict[PeerId, tuple[int, int]]:
        """Bytes sent to each peer, and received from it, so far: the parts of ``bytes_sent`` and ``bytes_received``."""
        ...

    def statistics(self) -> dict[str, int]:
        """Counters: bytes_sent, bytes_received, messages_sent, messages_received, queued_bytes, resent_bytes, ..."""
        ...

    async def finish(self, *, timeout: float) -> None:
        """The work of this process went well, and is done: wait until all that is on its way to peers has arrived there.

        From then on, that it closes is no loss: others hear of it only where they wait for this very peer. What a peer has no room
        for, since no receive there asks for it, is not on its way. Raises `PeerTimeoutError` once nothing has arrived anywhere for
        ``timeout`` seconds; as long as something does, it takes the time that the network needs.
        """
        ...

    async def close(self) -> None:
        """Drain what is queued (up to the drain time), then close every socket. Idempotent; pending waits raise.

        The drain time is short, since this is also how what has failed ends: `finish` comes before where others need the rest.
        """
        ...
