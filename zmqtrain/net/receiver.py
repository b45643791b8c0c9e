"""Receiving from a ROUTER, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from zmqtrain.heap import keep_frames
from zmqtrain.net.curve import Identity
from zmqtrain.net.monitor import DoorMonitor
from zmqtrain.net.settings import MIB
from zmqtrain.net.transport import Receiver
from zmqtrain.net.trouble import Intrusion

#: A turn of the receive loop ends after this many messages or bytes, so that other tasks run.
BUDGET_MESSAGES = 64
BUDGET_BYTES = 8 * MIB
#: Frames from this size on are used in place; copying smaller ones costs less than keeping track of them.
IN_PLACE_BYTES = 16 * 1024
#: For frames from this size on the C library asks the kernel for memory.
LARGE_BYTES = 128 * 1024
#: As plain numbers: pyzmq's own constants are enumerations, whose arithmetic takes longer than what it is for.
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)


class RouterReceiver:
    """One ROUTER, which only receives."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: int,
        router: zmq.Socket[bytes],
        identity: Identity | None,
        refused: Callable[[Intrusion, str], None],
        pause_s: float = 0.0,
    ) -> None:
        """``pause_s``: what arrives within this time is taken together."""
        self._pause_s = pause_s
        self._loop = loop
        self._lane = lane
        self._router = router
        self._identity = identity
        self._refused = refused
        self._monitor = DoorMonitor(loop, router, refused, encrypted=identity is not None)
        self._fd = int(router.getsockopt(zmq.FD))
        self._receiver: Receiver | None = None
        self._listens = False
        self._more: asyncio.Handle | None = None  # the next turn that the descriptor does not cause

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop.add_reader(self._fd, self._drain)
        self._listens = True
        self._more = self._loop.call_soon(self._drain)  # earlier messages do not trigger the descriptor again

    def _pause(self, taken: int) -> None:
        """There are no more messages. The descriptor announces the next one; but where some have just been taken, the next ones are
        looked for after the pause."""
        if not self._pause_s:
            return
        if taken and self._listens:
            self._loop.remove_reader(self._fd)
        elif not taken and not self._listens:
            self._loop.add_reader(self._fd, self._drain)
        self._listens = not taken
        if taken:
            self._more = self._loop.call_later(self._pause_s, self._drain)

    def _drain(self) -> None:
        """Take messages until there are none (the descriptor only announces the next one after that) or the budget is used up."""
        if self._more is not None:
            self._more.cancel()
            self._more = None
        router, lane, receiver = self._router, self._lane, self._receiver
        nbytes = 0
        for number in range(BUDGET_MESSAGES):
            if receiver is None or router.closed:
                return
            if number == 1 and not int(router.getsockopt(_EVENTS)) & _POLLIN:
                self._pause(number)
                return  # as after `Again`, which takes longer to raise; most often one message comes at a time
            try:
                route = router.recv(_NOBLOCK) if self._identity is None else self._route_of_caller(self._identity)
            except zmq.Again:
                self._pause(number)
                return
            frames: list[bytes | memoryview] = []
            more = True  # something always follows the route
            while more:
                frame = router.recv(_NOBLOCK, copy=False)
                more = frame.more
                size = len(frame)
                nbytes += size
                if size >= LARGE_BYTES:
                    keep_frames()
                frames.append(frame.buffer if size >= IN_PLACE_BYTES else frame.bytes)
            if route is not None:
                receiver.on_message(lane, route, frames)
                receiver = self._receiver
            if nbytes >= BUDGET_BYTES:
                break
        self._more = self._loop.call_soon(self._drain)

    def _route_of_caller(self, identity: Identity) -> bytes | None:
        """The next message's route; ``None`` if it belongs to another member than the caller's key does."""
        frame = self._router.recv(_NOBLOCK, copy=False)
        if identity.may_be(str(frame.get("User-Id")), frame.bytes):
            return frame.bytes
        self._refused(Intrusion.FALSE_NAME, str(frame.get("Peer-Address")))
        return None

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._receiver = None
        self._monitor.close()
        if self._more is not None:
            self._more.cancel()
        self._router.close(linger=0)
