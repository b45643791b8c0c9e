"""The only interface through which roles, exchanges and collectives use the network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, Protocol, TypeAlias

from zmqtrain.wire.payload import Payload, Value

#: The name of a process on the network, unique in a run: ``worker/3``, ``server/0``, ``agent/alpha``, ``coordinator``.
PeerId: TypeAlias = str
#: Identifies a message; sender and receiver must use the same tag: ``("gradient", step, bucket)``.
Tag: TypeAlias = tuple[str | int, ...]
#: What has become of a peer that was lost: it is gone for good; it can be reached again; another process has taken its place.
Returned: TypeAlias = Literal["no", "same", "another"]
#: Answers a request. If it raises a `ZmqTrainError`, the caller's ``request`` raises that error. See `EndingError`, too.
Handler: TypeAlias = Callable[..., Awaitable["Payload | Value"]]


class EndingError(Exception):
    """This process is about to end because of an error, and does nothing more. Who has asked it for something gets no answer, since
    the loss of this process, which soon follows, is what they must know of."""


class Sent(Protocol):
    """A message that was queued for sending."""

    @property
    def released(self) -> bool:
        """Whether the buffer may be written again: the peer's endpoint has acknowledged every byte."""
        ...

    async def wait_released(self) -> None:
        """Wait until ``released``. Raises `PeerLostError` if the peer is lost first (the buffer is then free, too)."""
        ...


class Subscription(Protocol):
    """All messages whose tag begins with one topic, from any peer, in arrival order (per-pair order is kept).

    A message uses its sender's byte credit until it is taken from here.
    """

    async def get(self) -> tuple[PeerId, Tag, Payload]: ...

    @property
    def ready(self) -> int:
        """The messages that have arrived and were not taken yet."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[PeerId, Tag, Payload]]: ...

    def close(self) -> None: ...


class Endpoint(Protocol):
    """One process's place on the network.

    Messages between two incarnations of two peers arrive exactly once and, for one tag, in order, even if the link between
    them breaks and is restored. A peer that is away for longer than the time-outs allow, or that returns as a new process, is
    *lost*: every wait for it raises `PeerLostError`.
    """

    peer: PeerId

    @property
    def address(self) -> str:
        """The address to which others connect: ``tcp://10.0.0.1:40001,40002`` or ``memory://worker/3``."""
        ...

    def add_peer(self, peer: PeerId, address: str) -> None:
        """Announce a peer's address. A send to it connects on demand. May be called again with a new address after a restart."""
        ...

    async def send(
        self, to: PeerId, tag: Tag, payload: Payload, *, priority: int = 0, lasting: bool = False, control: bool = False
    ) -> Sent:
        """Queue a message; returns once it is queued under the receiver's byte credit.

        The payload's memory must not change until the returned handle is released (or until a message from the peer proves that
        it has arrived). Higher ``priority`` goes first; messages with one tag keep their order.

        ``lasting``: the memory does not change until the peer has answered that it has *used* it, so a peer that shares the memory
        need not copy it.

        ``control``: over the control lane, as values go, where it waits for no tensor that is on its way. For small tensors that a
        peer stands still for. A message waits until those before it of its tag have arrived, if they go over the other lane.
        """
        ...

    async def receive(self, source: PeerId, tag: Tag, *, into: Payload | None = None) -> Payload:
        """The next message with this tag from this peer, whatever else arrived before it.

        Without ``into`` the result may alias the transport's memory: read it, do not write to it, and release it soon. With
        ``into`` the content is written there, and ``into`` (with the message's ``meta``) is returned.
        Raises `PeerLostError`. A second concurrent receive with the same source and tag queues behind the first.
        """
        ...

    def subscribe(self, topic: str) -> Subscription:
        """All messages whose tag begins with ``topic``; earlier ones are delivered first. A topic can have one subscriber."""
        ...

    async def request(self, to: PeerId, method: str, *args: Value, timeout: float) -> Payload:
        """Call ``method`` of the peer over the control lane. Raises `PeerTimeoutError`, `PeerLostError`, or the error that it
        answered."""
        ...

    def serve(self, method: str, handler: Handler) -> None:
        """Answer requests for ``method`` by ``await handler(caller, *args)``."""
        ...

    def on_lost(self, callback: Callable[[PeerId, str], None]) -> Callable[[], None]:
        """Call ``callback(peer, reason)`` whenever a peer is lost, but not if it closes after it has finished. Returns a function
        that ends this, for callers that live shorter than the endpoint."""
        ...

    def on_superseded(self, callback: Callable[[], None]) -> None:
        """For a process that leads the run (`zmqtrain.net.settings.NetSettings.epoch`): call ``callback`` once a process with a
        higher epoch leads it, as others tell in their greetings. They do not listen to this one any more."""
        ...

    def expect_back(self, peer: PeerId, wait: Callable[[], Awaitable[Returned]]) -> None:
        """From now on this peer may be lost and come back: ``wait()`` says whether, once that is known."""
        ...

    async def returned(self, peer: PeerId) -> Returned:
        """After an error that says that the peer is lost: wait until it is back, if it is one that is expected back. What was asked
        of it must be asked again."""
        ...

    @property
    def process(self) -> int:
        """A random number of this process, by which others tell it from an earlier one of the same name."""
        ...

    def forget(self, peer: PeerId, reason: str, *, process: int | None = None) -> None:
        """Treat the peer as lost from now on, because membership says so: waits for it raise at once, and `on_lost` is called.
        ``process``: of this name only that one is lost; if another one has greeted already, the link to that one stays."""
        ...

    def let_go(self, peer: PeerId) -> None:
        """The peer has finished and is gone, because membership says so, although its farewell has not arrived: as if it had."""
        ...

    def undelivered(self) -> list[PeerId]:
        """The peers to which something is on its way: those that `finish` waits for."""
        ...

    def pardon(self, count: int) -> None:
        """Do not warn about ``count`` callers that connect and disconnect without sending anything. For the preflight check, in
        which each host tries to connect (only this process knows how many will)."""
        ...

    def waits(self) -> list[str]:
        """What this process is waiting for from others, in words; shown if a simulated world comes to a standstill."""
        ...

    def show(self, peer: PeerId) -> None:
        """Let a peer know that this process is there, by the smallest of messages, to which it does not answer. It is not sent
        again if it gets lost, and not at all if there is no connection."""
        ...

    def heard_at(self, peer: PeerId) -> float | None:
        """When the newest message of a peer arrived, of whatever kind, on the loop's clock; ``None`` if there is no link to it."""
        ...

    def traffic(self) -> dict[PeerId, tuple[int, int]]:
        """Bytes sent to each peer, and received from it, so far: the parts of ``bytes_sent`` and ``bytes_received``."""
        ...

    def speeds(self) -> dict[PeerId, tuple[int, float]]:
        """For each peer to which large messages were sent: their bytes that have arrived so far, and the seconds in which some were
        on their way."""
        ...

    def statistics(self) -> dict[str, int]:
        """Counters: bytes_sent, bytes_received, messages_sent, messages_received, queued_bytes, resent_bytes, ..."""
        ...

    async def finish(self, *, timeout: float) -> None:
        """This process's work has ended well: wait until everything that is on its way to peers has arrived.

        After that, closing is not a loss: only waits for this very peer fail on other processes. Messages for which a peer has no
        room, since no receive there asks for them, do not count as on their way. Raises `PeerTimeoutError` once nothing has arrived
        anywhere for
        ``timeout`` seconds; while something does, it waits as long as the network needs.
        """
        ...

    async def close(self) -> None:
        """Flush the queue (within the flush time), then close every socket. Idempotent; pending waits raise.

        The flush time is short, since failed processes close in this way, too: call `finish` first if others need what is queued.
        """
        ...
