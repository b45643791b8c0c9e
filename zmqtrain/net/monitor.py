"""What ZeroMQ tells of connections: a socket's monitor, read by the event loop."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from collections.abc import Callable
from itertools import count

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmqtrain.net.trouble import Intrusion, Trouble

_numbers = count()
#: A server and a client that disagree about encryption.
_MISMATCH = int(zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_CRYPTOGRAPHIC = int(zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)


class Monitor:
    """Calls ``heard(event, value)`` for some events of one socket. Close it before the socket."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, watched: zmq.Socket[bytes], events: int, heard: Callable[[int, int], None]
    ) -> None:
        self._loop, self._watched, self._heard = loop, watched, heard
        place = f"inproc://monitor-{next(_numbers)}"
        watched.monitor(place, events)
        self._socket = watched.context.socket(zmq.PAIR)
        # Without a mark: at one the I/O thread would wait for this process's Python, and all its connections with it.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(place)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._first: asyncio.Handle = loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                event = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._heard(int(event["event"]), int(event["value"]))

    def close(self) -> None:
        # In this order: while a socket is monitored, its I/O thread holds a lock as it sends an event, and would wait for ever on a
        # monitor that is closed; `disable_monitor` would then wait for the lock, with the GIL held.
        self._watched.disable_monitor()
        self._loop.remove_reader(self._fd)
        self._first.cancel()
        self._socket.close(linger=0)


class CallMonitor:
    """Tells what becomes of a DEALER's connection: ``changed(up)``, and ``failed(trouble, over)`` where the handshake goes wrong;
    ``over``: ZeroMQ does not try again."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        dealer: zmq.Socket[bytes],
        *,
        encrypted: bool,
        changed: Callable[[bool], None],
        failed: Callable[[Trouble, bool], None],
    ) -> None:
        self._encrypted, self._changed, self._failed = encrypted, changed, failed
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if encrypted:  # in plain text it is no more than a connection that broke early
            events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._monitor = Monitor(loop, dealer, events, self._heard)

    def _heard(self, event: int, value: int) -> None:
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
            self._changed(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failed(Trouble.UNLISTED, True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failed(Trouble.OTHER_KEY, False)
        elif value == _MISMATCH:
            self._failed(Trouble.PLAIN if self._encrypted else Trouble.ENCRYPTED, True)
        else:
            self._failed(Trouble.OTHER_KEY if self._encrypted else Trouble.GARBLED, True)

    def close(self) -> None:
        self._monitor.close()


class DoorMonitor:
    """Tells of callers at a ROUTER whose handshake fails, and where they came from: ``refused(intrusion, origin)``.

    Keys that nobody knows are not among them: those the ZAP handler sees.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, router: zmq.Socket[bytes], refused: Callable[[Intrusion, str], None]
    ) -> None:
        self._refused = refused
        self._origins: dict[int, str] = {}  # of connections, by their descriptor
        self._failed: Intrusion | None = None  # what the next connection that ends has done
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._monitor = Monitor(loop, router, events, self._heard)

    def _heard(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._origins[value] = _origin_of(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._tell(self._origins.pop(value, ""))
        else:
            self._tell("")  # of another connection, in another I/O thread
            wrong_key = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _CRYPTOGRAPHIC
            self._failed = Intrusion.WRONG_KEY if wrong_key else Intrusion.NO_KEY

    def _tell(self, origin: str) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            self._refused(failed, origin)

    def close(self) -> None:
        self._monitor.close()


def _origin_of(descriptor: int) -> str:
    """The address at the other end of a connection; empty where it has gone. For people: by now it may be another connection's."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""
