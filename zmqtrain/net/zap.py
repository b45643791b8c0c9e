"""The handler that server sockets ask about callers (ZeroMQ's authentication protocol, RFC 27), on the endpoint's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from zmqtrain.net.curve import DOMAIN, Identity
from zmqtrain.net.password import Password
from zmqtrain.net.trouble import USUAL_S

#: The address at which servers ask, according to the protocol; there is one in each context.
PLACE = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
#: A turn of the loop ends after this many questions, so that other tasks run.
BUDGET = 64
#: Unknown keys that are remembered until it is clear whether they become members.
MAX_DOUBTFUL = 256


class ZapHandler:
    """Admits the callers on an `Identity`'s list, or with the `Password`. Make it before its context's server sockets are bound."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        door: Identity | Password,
        refused: Callable[[str], None],
    ) -> None:
        """``door``: whom to admit. ``refused`` is called with the address of each caller that is not admitted."""
        self._loop, self._door, self._refused = loop, door, refused
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # The askers are connections, which wait, and end by themselves if the answer takes too long.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(PLACE)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._more: asyncio.Handle | None = loop.call_soon(self._drain)
        self._doubtful: dict[bytes, str] = {}  # keys that may still be admitted -> where they came from
        self._verdict: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Accept no more connections from now on."""
        self._loop.remove_reader(self._fd)
        for handle in (self._more, self._verdict):
            if handle is not None:
                handle.cancel()
        self._socket.close(linger=0)

    def _drain(self) -> None:
        """Answer until there are no questions (the descriptor only announces the next one after that) or the budget is used up."""
        if self._more is not None:
            self._more.cancel()
            self._more = None
        for _ in range(BUDGET):
            if self._socket.closed:
                return
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(question)
        self._more = self._loop.call_soon(self._drain)

    def _answer(self, question: list[bytes]) -> None:
        route, _, _version, number, domain, address, _identity, mechanism, *credentials = question
        name = None
        if domain == DOMAIN and isinstance(self._door, Password) and mechanism == b"PLAIN":
            name = self._door.name_of(credentials)
        elif domain == DOMAIN and isinstance(self._door, Identity) and mechanism == b"CURVE" and len(credentials) == 1:
            name = self._door.name_of(credentials[0])
        # Not 300, "later", with which ZeroMQ keeps the connection until the handshake times out. A caller that will soon be on the
        # list comes again by itself.
        code, text = (b"200", b"") if name is not None else (b"400", b"unknown key")
        self._socket.send_multipart([route, b"", _VERSION, number, code, text, (name or "").encode(), b""], zmq.NOBLOCK)
        if name is None:
            self._turned_away(credentials[0] if credentials else b"", address.decode(errors="replace"))

    def _turned_away(self, key: bytes, origin: str) -> None:
        if isinstance(self._door, Password) or self._door.is_complete or len(self._doubtful) >= MAX_DOUBTFUL:
            self._refused(origin)
            return
        # It may be a member that was told of this one first: it will soon be on the list, and is not an intruder.
        self._doubtful[key] = origin
        if self._verdict is None:
            self._verdict = self._loop.call_later(USUAL_S, self._judge, self._door)

    def _judge(self, identity: Identity) -> None:
        self._verdict = None
        doubtful, self._doubtful = self._doubtful, {}
        for key, origin in doubtful.items():
            if identity.name_of(key) is None:
                self._refused(origin)
