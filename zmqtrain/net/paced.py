"""A transport that sends no faster than a given network would, over another one that is as fast as this machine.

A message is passed to the transport below when its last byte would have arrived: when all NICs on its path have carried it, and the
latency has passed. Incoming messages are not changed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TypeAlias

from zmqtrain.net.alarm import Alarm, LoopAlarm, real_alarm
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.nics import Nics
from zmqtrain.net.outbox import BULK, CONTROL
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shaping import LinkShape, Shaping, SharedNics
from zmqtrain.net.transport import Frames, Receiver, Transport
from zmqtrain.net.trouble import Intrusion, Trouble
from zmqtrain.wire.message import Header

#: What is due this soon after now is done now: waking up again would cost more.
SLACK_S = 20e-6
#: The transport below takes everything that the links above let through; if it refuses, try again after this time.
RETRY_S = 0.005
#: How often to look whether links have been cut or healed, in a run in which that can be.
LOOK_S = 0.05

MakeAlarm: TypeAlias = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Alarm]


class PacedTransport:
    """Implements `zmqtrain.net.transport.Transport` over another transport."""

    def __init__(
        self,
        below: Transport,
        shaping: Shaping,
        *,
        nics: AbstractContextManager[Nics] | None = None,
        alarm: MakeAlarm = LoopAlarm,
        hold_bytes: int,
        farewell_s: float,
        silent_s: Callable[[PeerId], float] = lambda _: 3.0,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        """``nics``: the network's NICs, to be entered for each reservation. ``silent_s``: a connection to a peer breaks if its
        link has been cut for so long.

        ``hold_bytes``: the most bytes for one peer that may wait here. It equals what a link has in flight, since a transport
        without pacing takes that at once, too, and a more urgent message must have to wait for the same amount.
        """
        self._below, self._shaping = below, shaping
        self._nics: AbstractContextManager[Nics] = nullcontext(Nics([], [])) if nics is None else nics
        self._loop = asyncio.get_running_loop()
        self._alarm = alarm(self._loop, self._ring)
        self._hold_bytes, self._farewell_s, self._silent_s = hold_bytes, farewell_s, silent_s
        self._on_closed = on_closed
        self._flows: dict[PeerId, _Flow] = {}
        self._leaving: dict[PeerId, _Flow] = {}
        self._places: dict[PeerId, tuple[str, bytes]] = {}  # the address of each flow's peer, and our name there
        self._silent: dict[PeerId, float] = {}  # since when the link to a peer has been cut
        self._severed: set[PeerId] = set()  # peers whose connection has broken for that reason
        self._missed: set[PeerId] = (
            set()
        )  # peers of whose connection something was heard meanwhile, which a real one would not tell
        self._ear: _Ear | None = None
        self._left: asyncio.Event | None = None  # set, once closing, when all farewells have been sent
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._alarm_at = float("inf")
        self._ringing = False

    @property
    def address(self) -> str:
        return self._below.address

    def start(self, receiver: Receiver) -> None:
        self._ear = _Ear(receiver, self._hears)
        self._below.start(self._ear)
        if self._shaping.conditions is not None:
            self._look()

    def find(self, peer: PeerId) -> str:
        return self._below.find(peer)

    def connect(self, peer: PeerId, address: str, route: bytes) -> None:
        self.disconnect(peer)
        if peer in self._leaving:
            self._leave(self._leaving[peer])
        way = self._shaping.way_to(peer)
        if way is not None:
            self._flows[peer] = _Flow(self, peer, way)
            self._places[peer] = address, route
            if self._is_silent(peer):
                self._severed.add(peer)
        if way is None or not (way.down or peer in self._severed):
            self._below.connect(peer, address, route)

    def disconnect(self, peer: PeerId) -> None:
        """A farewell that was just passed on is still sent at its time, and the connection ends after it."""
        flow = self._flows.pop(peer, None)
        self._silent.pop(peer, None)
        self._severed.discard(peer)
        self._missed.discard(peer)
        if flow is None:
            if peer not in self._leaving:
                self._below.disconnect(peer)
            return
        self._leaving[peer] = flow
        flow.farewell()

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int, header: Header | None = None) -> bool:
        flow = self._flows.get(peer)
        if flow is None:
            return self._below.send(peer, lane, frames, nbytes)
        return flow.send(lane, frames, max(nbytes, sum(len(frame) for frame in frames)))

    def post(self, address: str, frames: Frames) -> None:
        self._below.post(address, frames)

    async def close(self) -> None:
        if self._left is not None:
            return
        self._left = asyncio.Event()
        if self._ear is not None:
            self._ear.open = False
        for peer in list(self._flows):
            self.disconnect(peer)
        if self._leaving:
            try:
                async with asyncio.timeout(self._farewell_s):
                    await self._left.wait()
            except TimeoutError:
                pass
        self._alarm.close()
        self._due.clear()
        self._leaving.clear()
        if self._on_closed is not None:
            self._on_closed()
        await self._below.close()

    # Links that are cut while the run goes on.

    def _cut(self, peer: PeerId) -> bool:
        """Whether nothing gets to the peer now."""
        conditions, shaping = self._shaping.conditions, self._shaping
        return conditions is not None and conditions.cut(shaping.host, shaping.host_of[peer])

    def _is_silent(self, peer: PeerId) -> bool:
        """Whether no connection to the peer can last."""
        conditions, shaping = self._shaping.conditions, self._shaping
        return conditions is not None and conditions.silent(shaping.host, shaping.host_of[peer])

    def _hears(self, peer: PeerId) -> bool:
        """Whether it can be known now what becomes of a connection to the peer."""
        if peer in self._flows and self._is_silent(peer):
            self._missed.add(peer)
            return False
        return True

    def _look(self) -> None:
        """Break connections whose links have been cut for too long, as heartbeats would, and make them anew after that. The sockets
        below know nothing of it."""
        now = self._loop.time()
        for peer in list(self._flows):
            if self._flows[peer].way.down:
                continue
            if not self._is_silent(peer):
                self._silent.pop(peer, None)
                if peer in self._missed and peer not in self._severed:
                    self._sever(peer)
                self._missed.discard(peer)
                if peer in self._severed:
                    self._severed.discard(peer)
                    self._below.connect(peer, *self._places[peer])
            elif now - self._silent.setdefault(peer, now) >= self._silent_s(peer) and peer not in self._severed:
                self._sever(peer)
        self._at(now + LOOK_S, self._look)

    def _sever(self, peer: PeerId) -> None:
        self._severed.add(peer)
        before = self._flows[peer]
        before.drop()  # what is on the way is lost
        self._flows[peer] = _Flow(self, peer, before.way)
        self._below.disconnect(peer)
        if self._ear is not None:
            self._ear.break_link(peer)

    # Calls by flows.

    def _at(self, when: float, what: Callable[[], None]) -> None:
        """Do something at a time of the loop's clock."""
        heapq.heappush(self._due, (when, next(self._order), what))
        if when < self._alarm_at and not self._ringing:
            self._alarm_at = when
            self._alarm.set(when)

    def _ring(self) -> None:
        self._ringing = True
        due = self._due
        while due and due[0][0] <= self._loop.time() + SLACK_S:
            heapq.heappop(due)[2]()
        self._ringing = False
        self._alarm_at = due[0][0] if due else float("inf")
        if due:
            self._alarm.set(self._alarm_at)

    def _leave(self, flow: _Flow) -> None:
        """The flow has nothing more to send, or no time for it."""
        flow.drop()
        self._below.disconnect(flow.peer)
        del self._leaving[flow.peer]
        if self._left is not None and not self._leaving:
            self._left.set()


def open_paced(below: Transport, shaping: Shaping, settings: NetSettings) -> PacedTransport:
    """A paced transport over a real one, with NICs that all processes of the run share. It closes ``below``."""
    nics = SharedNics(shaping.nics_file, shaping.rates) if shaping.nics_file else None
    return PacedTransport(
        below,
        shaping,
        nics=nics,
        alarm=real_alarm,
        hold_bytes=settings.inflight_bytes,
        farewell_s=settings.farewell_s,
        silent_s=lambda peer: 3 * settings.heartbeat_to(peer),
        on_closed=None if nics is None else nics.close,
    )


class _Ear:
    """A receiver that delivers nothing once this transport closes, while farewells are still sent below."""

    def __init__(self, receiver: Receiver, hears: Callable[[PeerId], bool]) -> None:
        """``hears(peer)``: whether to tell what becomes of a connection."""
        self._receiver, self._hears = receiver, hears
        self.open = True

    def on_message(self, lane: int, route: bytes, frames: Frames, header: Header | None = None) -> None:
        if self.open:
            self._receiver.on_message(lane, route, frames, header)

    def break_link(self, peer: PeerId) -> None:
        """The connection breaks because its link is cut."""
        self._receiver.on_link_down(peer)

    def on_link_up(self, peer: PeerId) -> None:
        if self.open and self._hears(peer):
            self._receiver.on_link_up(peer)

    def on_link_down(self, peer: PeerId) -> None:
        if self.open and self._hears(peer):
            self._receiver.on_link_down(peer)

    def on_gone(self, peer: PeerId) -> None:
        if self.open and self._hears(peer):
            self._receiver.on_gone(peer)

    def on_trouble(self, peer: PeerId, trouble: Trouble | None) -> None:
        if self.open:
            self._receiver.on_trouble(peer, trouble)

    def on_intruder(self, intrusion: Intrusion, origin: str) -> None:
        if self.open:
            self._receiver.on_intruder(intrusion, origin)


class _Parcel:
    """One message on its way."""

    __slots__ = ("frames", "nbytes", "ready")

    def __init__(self, frames: Frames, nbytes: int, ready: float) -> None:
        self.frames, self.nbytes, self.ready = frames, nbytes, ready


class _Flow:
    """What is sent to one peer on another host: small messages, each at its own time, and bulk data, one piece after another."""

    def __init__(self, transport: PacedTransport, peer: PeerId, way: LinkShape) -> None:
        self.peer, self.way = peer, way
        self._transport = transport
        self._waiting: deque[_Parcel] = deque()  # for the sender's NIC, which the first one has requested
        self._travelling: tuple[deque[_Parcel], deque[_Parcel]] = (deque(), deque())
        self._last_due = [0.0, 0.0]
        self._held_bytes = 0
        self._dropped = self._parting = False

    def send(self, lane: int, frames: Frames, nbytes: int) -> bool:
        if self.way.down or self.peer in self._transport._severed:
            return True
        now = self._transport._loop.time()
        parcel = _Parcel(frames, nbytes, now)
        if lane == CONTROL:
            self._arrives(lane, parcel, self._slip(nbytes, now))
            return True
        if self._held_bytes and self._held_bytes + nbytes > self._transport._hold_bytes:
            return False
        self._held_bytes += nbytes
        if not self.way.nics:
            self._arrives(lane, parcel, now)
            return True
        self._waiting.append(parcel)
        if len(self._waiting) == 1:
            self._ask(parcel)
        return True

    def farewell(self) -> None:
        """Send only what is on the control lane; then tell the transport."""
        self._parting = True
        self._waiting.clear()
        self._travelling[BULK].clear()
        if not self._travelling[CONTROL]:
            self._transport._leave(self)

    def drop(self) -> None:
        """Pass on at once what is left on the control lane, if anything can pass; nothing comes after this."""
        self._dropped = True
        for parcel in () if self._transport._cut(self.peer) else self._travelling[CONTROL]:
            self._transport._below.send(self.peer, CONTROL, parcel.frames, parcel.nbytes)
        self._travelling[CONTROL].clear()

    def _slip(self, nbytes: int, now: float) -> float:
        if not self.way.nics:
            return now
        with self._transport._nics as nics:
            return nics.slip(self.way.nics, nbytes, now)

    def _ask(self, parcel: _Parcel) -> None:
        """Have the sender's NIC carry the first waiting piece."""
        with self._transport._nics as nics:
            start, end = nics.reserve(self.way.nics[0], parcel.nbytes, parcel.ready)
        self._transport._at(end, lambda: self._carried(parcel, start, end))

    def _carried(self, parcel: _Parcel, start: float, end: float) -> None:
        """The sender's NIC has carried it: it goes on to the other NICs, and the next piece may request the sender's."""
        if self._dropped or self._parting:
            return
        waiting = self._waiting
        waiting.popleft()
        with self._transport._nics as nics:
            through = nics.follow(self.way.nics[1:], parcel.nbytes, start, end)
            if waiting:
                following = waiting[0]
                next_start, next_end = nics.reserve(self.way.nics[0], following.nbytes, max(following.ready, end))
        if waiting:
            self._transport._at(next_end, lambda: self._carried(following, next_start, next_end))
        self._arrives(BULK, parcel, through)

    def _arrives(self, lane: int, parcel: _Parcel, through: float) -> None:
        conditions, latency_s = self._transport._shaping.conditions, self.way.latency_s
        if conditions is not None:
            latency_s *= conditions.delay(self._transport._shaping.peer)
        due = self._last_due[lane] = max(through + latency_s, self._last_due[lane])
        self._travelling[lane].append(parcel)
        self._transport._at(due, lambda: self._hand_over(lane))

    def _hand_over(self, lane: int) -> None:
        travelling = self._travelling[lane]
        if self._dropped or not travelling:
            return
        parcel = travelling[0]
        transport = self._transport
        cut = transport._cut(self.peer)  # holds everything back, as TCP does, until it is healed or the connection breaks
        if cut or not transport._below.send(self.peer, lane, parcel.frames, parcel.nbytes):
            transport._at(transport._loop.time() + (LOOK_S if cut else RETRY_S), lambda: self._hand_over(lane))
            return
        travelling.popleft()
        if lane == BULK:
            self._held_bytes -= parcel.nbytes
        if self._parting and lane == CONTROL and not travelling:
            self._transport._leave(self)
