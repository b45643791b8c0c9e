"""Sockets for a thread that waits: small messages between two processes without an event loop on either side.

Each process binds a ROUTER, which only receives, and has a DEALER per peer, which only sends, as an endpoint does, and admits the
same callers. Nothing is acknowledged or repeated: what a broken connection has lost is the caller's concern.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from zmqtrain.heap import keep_frames
from zmqtrain.net.curve import Identity
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.receiver import LARGE_BYTES

#: As plain numbers, see `zmqtrain.net.receiver`.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: The session in the routes of these sockets, of which each process has one set.
SESSION = 0


class BlockingSockets:
    """One process's sockets. Any thread may call the methods, one at a time."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        port: int,
        dealer: Callable[[PeerId, str], zmq.Socket[bytes]],
        route: Callable[[PeerId], bytes],
        identity: Identity | None,
        wait_s: float,
    ) -> None:
        """
        Args:
            router: listens at ``port``.
            dealer: makes a socket that is connected to the peer at an address.
            route: the name under which a peer's messages come.
            identity: admits callers, if messages are encrypted.
            wait_s: the longest time that `receive` waits.
        """
        router.setsockopt(zmq.RCVTIMEO, int(1000 * wait_s))
        self._router, self.port, self._dealer, self._route, self._identity = router, port, dealer, route, identity
        self._dealers: dict[PeerId, zmq.Socket[bytes]] = {}
        self._peers: dict[bytes, PeerId] = {}  # by route
        self._turn = threading.Lock()
        self._closing = False  # read without waiting for a turn: who waits for messages would take it again and again

    def connect(self, peer: PeerId, address: str) -> None:
        """Send to the peer there, and receive from it. It must have admitted this process already."""
        with self._turn:
            self._dealers[peer] = self._dealer(peer, address)
            self._peers[self._route(peer)] = peer

    def send(self, peer: PeerId, head: bytes, body: zmq.Frame | None = None) -> None:
        """Queue a message; never blocks. ``body``'s memory may be sent to several peers, and must not be written any more."""
        with self._turn:
            dealer = self._dealers.get(peer)
            if dealer is None:
                return  # closed
            if body is None:
                dealer.send(head, _NOBLOCK)
            else:
                dealer.send(head, _MORE)
                dealer.send(body, _NOBLOCK, copy=False)

    def receive(self, *, wait: bool = True) -> tuple[PeerId, bytes, zmq.Frame | None] | None:
        """The next message, and whose it is; ``None`` if none has come in time, or one that is not valid."""
        if self._closing:
            return None
        with self._turn:
            router = self._router
            if router.closed:
                return None
            try:
                first = router.recv(0 if wait else _NOBLOCK, copy=False)
            except zmq.Again:
                return None
            frames = []
            more = True  # something always follows the route
            while more:
                frames.append(router.recv(_NOBLOCK, copy=False))
                more = frames[-1].more
        peer = self._peers.get(first.bytes)
        if peer is None or len(frames) > 2:
            return None
        if self._identity is not None and not self._identity.may_be(str(first.get("User-Id")), first.bytes):
            return None
        body = frames[1] if len(frames) == 2 else None
        if body is not None and len(body) >= LARGE_BYTES:
            keep_frames()
        return peer, frames[0].bytes, body

    def close(self) -> None:
        """Close all of them, after a call of another thread has ended."""
        self._closing = True
        with self._turn:
            for socket in (self._router, *self._dealers.values()):
                socket.close(linger=0)
            self._dealers.clear()
