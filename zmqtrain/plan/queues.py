"""A small simulation of things that wait for each other, with its own clock: lines, and NICs that are shared evenly.

An actor is a generator: it yields what it waits for, as a `Begin`, and is resumed when that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

GoOn: TypeAlias = Callable[[], None]
#: Starts something, and calls back when it is over.
Begin: TypeAlias = Callable[[GoOn], None]
Life: TypeAlias = Generator[Begin, None, None]

#: A lower bound on the time of a byte: a transfer that takes no time would never end.
_LEAST_BYTE_S = 1e-18


class Queues:
    """The clock, and the pending events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._events: list[tuple[float, int, GoOn]] = []

    def at(self, seconds: float, then: GoOn) -> None:
        """Call ``then`` after this many seconds."""
        heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def sleep(self, seconds: float) -> Begin:
        """Something that takes this many seconds."""
        return lambda go_on: self.at(seconds, go_on)

    def start(self, life: Life, ended: GoOn | None = None) -> None:
        """Run an actor, starting now."""

        def go_on() -> None:
            begin = next(life, None)
            if begin is not None:
                begin(go_on)
            elif ended is not None:
                ended()

        go_on()

    def together(self, lives: Sequence[Life]) -> Begin:
        """Run all actors, until the last one has finished."""

        def begin(go_on: GoOn) -> None:
            left = len(lives)

            def ended() -> None:
                nonlocal left
                left -= 1
                if not left:
                    go_on()

            for life in lives:
                self.start(life, ended)

        return begin

    def run(self) -> None:
        """Run until no event is pending."""
        while self._events:
            self.now, _, then = heappop(self._events)
            then()


class Line:
    """A resource for one user at a time. Of those waiting, the lowest rank is next; of equals, the one that came first."""

    def __init__(self, queues: Queues) -> None:
        self._queues, self._busy = queues, False
        self._waiting: list[tuple[int, int, GoOn]] = []
        self._numbers = count()

    def taken(self, rank: int, work: Begin) -> Life:
        """Wait for the resource, and hold it while ``work`` runs."""
        yield self.take(rank)
        yield work
        self.give()

    def take(self, rank: int = 0) -> Begin:
        """Wait for the resource, and hold it until `give` is called."""
        return lambda go_on: self._come(rank, go_on)

    def give(self) -> None:
        """Pass the resource to the next one waiting."""
        self._busy = False
        if self._waiting:
            self._busy = True
            # Not called directly from here: the caller must finish with the resource first.
            self._queues.at(0.0, heappop(self._waiting)[2])

    def _come(self, rank: int, go_on: GoOn) -> None:
        if self._busy:
            heappush(self._waiting, (rank, next(self._numbers), go_on))
        else:
            self._busy = True
            go_on()


class Nic:
    """One direction of a NIC. All simultaneous users get the same share."""

    def __init__(self, queues: Queues) -> None:
        self._queues, self._since, self._version = queues, 0.0, 0
        self._flows: list[_Flow] = []

    def carry(self, nbytes: float, alone_byte_s: float, nic_byte_s: float) -> Begin:
        """``alone_byte_s``: seconds per byte if nothing else uses it, by the slowest part of the path; ``nic_byte_s``: on this
        NIC."""

        def begin(go_on: GoOn) -> None:
            self._advance()
            self._flows.append(_Flow(nbytes, max(alone_byte_s, _LEAST_BYTE_S), nic_byte_s, go_on))
            self._plan()

        return begin

    def _advance(self) -> None:
        passed_s, self._since = self._queues.now - self._since, self._queues.now
        for flow in self._flows:
            flow.left -= passed_s / flow.byte_s(len(self._flows))

    def _plan(self) -> None:
        self._version += 1
        if self._flows:
            many = len(self._flows)
            first = min(self._flows, key=lambda flow: flow.left * flow.byte_s(many))
            version = self._version
            self._queues.at(max(0.0, first.left * first.byte_s(many)), lambda: self._ends(first, version))

    def _ends(self, flow: _Flow, version: int) -> None:
        if version == self._version:  # no transfer has started in the meantime
            self._advance()
            self._flows.remove(flow)
            self._plan()
            flow.go_on()


class _Flow:
    __slots__ = ("alone_byte_s", "go_on", "left", "nic_byte_s")

    def __init__(self, left: float, alone_byte_s: float, nic_byte_s: float, go_on: GoOn) -> None:
        self.left, self.alone_byte_s, self.nic_byte_s, self.go_on = left, alone_byte_s, nic_byte_s, go_on

    def byte_s(self, many: int) -> float:
        return max(self.alone_byte_s, many * self.nic_byte_s)
