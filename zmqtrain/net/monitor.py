"""ZeroMQ's events about connections: a socket's monitor, read by the event loop."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import struct
from collections.abc import Callable
from itertools import count

import zmq

from zmqtrain.net.trouble import Intrusion, Trouble

#: How long the events of callers may wait for further ones, in seconds.
PAUSE_S = 0.25
_numbers = count()
_EVENT = struct.Struct("=Hi")
_SUCCEEDED, _ACCEPTED, _DISCONNECTED = map(int, (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED))
_CLOSED = int(zmq.EVENT_CLOSED)
#: Handshake errors of a server and a client that disagree about encryption.
_MISMATCH = int(zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_CRYPTOGRAPHIC = int(zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)


class Monitor:
    """Calls ``heard`` with some events of one socket, each with its value. Close it before the socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watched: zmq.Socket[bytes],
        events: int,
        heard: Callable[[list[tuple[int, int]]], None],
        *,
        pause_s: float = 0.0,
    ) -> None:
        """``pause_s``: events that follow each other within this time are reported together."""
        self._loop, self._watched, self._heard, self._pause_s = loop, watched, heard, pause_s
        place = f"inproc://monitor-{next(_numbers)}"
        watched.monitor(place, events)
        self._socket = watched.context.socket(zmq.PAIR)
        # No high-water mark: at one, the I/O thread with all its connections would wait for this process's Python code.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(place)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._next: asyncio.Handle = loop.call_soon(self._drain)

    def _drain(self) -> None:
        events = []
        while not self._socket.closed:
            try:
                event: tuple[int, int] = _EVENT.unpack(self._socket.recv(zmq.NOBLOCK))
                self._socket.recv(zmq.NOBLOCK)  # the address that was bound or connected to, which we know
            except zmq.Again:
                break
            events.append(event)
        if not events:
            return
        if self._pause_s:
            self._loop.remove_reader(self._fd)
            self._next = self._loop.call_later(self._pause_s, self._listen)
        self._heard(events)

    def _listen(self) -> None:
        self._loop.add_reader(self._fd, self._drain)
        self._drain()

    def close(self) -> None:
        # In this order: while a socket is monitored, its I/O thread holds a lock as it sends an event, and would wait for ever on a
        # closed monitor; `disable_monitor` would then wait for the lock, with the GIL held.
        self._watched.disable_monitor()
        self._loop.remove_reader(self._fd)
        self._next.cancel()
        self._socket.close(linger=0)


class CallMonitor:
    """Reports changes of a DEALER's connection: ``changed(up)``, and ``failed(trouble, over)`` if the handshake fails;
    no ``trouble``: for a reason that this end does not see. ``over``: ZeroMQ does not try again. ``missed()``: there was nothing to
    shake hands with."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        dealer: zmq.Socket[bytes],
        *,
        encrypted: bool,
        changed: Callable[[bool], None],
        failed: Callable[[Trouble | None, bool], None],
        missed: Callable[[], None] | None = None,
    ) -> None:
        self._encrypted, self._changed, self._failed, self._missed = encrypted, changed, failed, missed
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if missed is not None:
            events |= zmq.EVENT_CLOSED
        self._monitor = Monitor(loop, dealer, events, self._heard)

    def _heard(self, events: list[tuple[int, int]]) -> None:
        for event, value in events:
            self._hear(event, value)

    def _hear(self, event: int, value: int) -> None:
        if event in (_SUCCEEDED, _DISCONNECTED):
            self._changed(event == _SUCCEEDED)
        elif event == _CLOSED:
            if self._missed is not None:
                self._missed()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failed(Trouble.UNLISTED, True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # In plain text the connection broke early: perhaps since the other end was the first to see that the two do not fit.
            self._failed(Trouble.OTHER_KEY if self._encrypted else None, False)
        elif value == _MISMATCH:
            self._failed(Trouble.PLAIN if self._encrypted else Trouble.ENCRYPTED, True)
        else:
            self._failed(Trouble.OTHER_KEY if self._encrypted else Trouble.GARBLED, True)

    def close(self) -> None:
        self._monitor.close()


class DoorMonitor:
    """Reports callers of a ROUTER whose handshake fails, and where they came from: ``refused(intrusion, origin)``.

    Callers with unknown keys or passwords are not among them: the ZAP handler sees those.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        router: zmq.Socket[bytes],
        refused: Callable[[Intrusion, str], None],
        *,
        encrypted: bool,
    ) -> None:
        self._refused = refused
        self._other = Intrusion.NO_KEY if encrypted else Intrusion.NO_TOKEN
        self._origins: dict[int, str | None] = {}  # connection's descriptor -> origin; None: not looked up yet
        self._failed: Intrusion | None = None  # what the next connection that ends has done
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if encrypted:  # in plain text this means only that a connection broke early, as members' do when this process is too busy
            events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        # Strangers must not be able to wake this process as often as they like.
        self._monitor = Monitor(loop, router, events, self._heard, pause_s=PAUSE_S)

    def _heard(self, events: list[tuple[int, int]]) -> None:
        for event, value in events:
            if event == _ACCEPTED:
                self._origins[value] = None
            elif event == _DISCONNECTED:
                self._tell(self._origins.pop(value, None) or "")
            else:
                self._tell("")  # it belongs to another connection, in another I/O thread
                self._failed = Intrusion.WRONG_KEY if value == _CRYPTOGRAPHIC else self._other
        # Only for connections that still exist: other descriptors may have been reused.
        for descriptor, origin in self._origins.items():
            if origin is None:
                self._origins[descriptor] = _origin_of(descriptor)

    def _tell(self, origin: str) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            self._refused(failed, origin)

    def close(self) -> None:
        self._monitor.close()


def _origin_of(descriptor: int) -> str:
    """The address at the other end of a connection; empty if it has just gone."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""
