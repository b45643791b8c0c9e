"""Sequence numbers of one lane: exactly once and in order over a transport that may drop what was in flight. Sans-IO.

The sender keeps every piece (by reference) until it is acknowledged, and goes back to the first missing one if asked. The receiver
takes pieces in order only. A transport that loses a piece loses it silently; so the sender *probes* over the same lane after a
reconnect or a long silence, and the receiver sees from the probe's number what did not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from zmqtrain.errors import WireError

Owner = TypeVar("Owner")


@dataclass(slots=True)
class Parcel(Generic[Owner]):
    """One piece on its way. Its frames alias the sender's memory until it is acknowledged."""

    sequence: int
    frames: Sequence[bytes | memoryview]
    nbytes: int
    owner: Owner
    wire_bytes: int
    """What the transport carries of it: less than ``nbytes`` where the bytes lie in shared memory."""


class SendLane(Generic[Owner]):
    """Pieces that were handed to the transport, and those that must be sent again."""

    __slots__ = ("_cursor", "_furthest", "inflight_bytes", "next_sequence", "resent_bytes", "unacknowledged")

    def __init__(self) -> None:
        self.unacknowledged: deque[Parcel[Owner]] = deque()
        self._cursor = 0
        self._furthest = 0  # every piece below this was handed over at least once
        self.next_sequence = 0
        self.inflight_bytes = 0
        self.resent_bytes = 0

    @property
    def arrived(self) -> int:
        """Every piece below this number was acknowledged."""
        return self.next_sequence - len(self.unacknowledged)

    @property
    def transmitted(self) -> int:
        """Every piece below this number was handed to the transport."""
        return self.arrived + self._cursor

    def add(
        self, frames: Sequence[bytes | memoryview], nbytes: int, owner: Owner, *, wire_bytes: int | None = None
    ) -> Parcel[Owner]:
        parcel = Parcel(self.next_sequence, frames, nbytes, owner, nbytes if wire_bytes is None else wire_bytes)
        self.next_sequence += 1
        self.inflight_bytes += nbytes
        self.unacknowledged.append(parcel)
        return parcel

    def peek(self) -> Parcel[Owner] | None:
        """The piece that the transport should take next."""
        return self.unacknowledged[self._cursor] if self._cursor < len(self.unacknowledged) else None

    def advance(self) -> None:
        """The transport took what `peek` gave."""
        self._cursor += 1
        self._furthest = max(self._furthest, self.transmitted)

    def acknowledge(self, upto: int) -> list[Parcel[Owner]]:
        """All pieces below ``upto`` have arrived; those that had not been acknowledged before.

        They may be ahead of `transmitted`: what was thought lost, so that we went back, was only late.
        """
        if upto > self._furthest:
            raise WireError(f"piece {upto - 1} is acknowledged, but {self._furthest} were sent")
        done: list[Parcel[Owner]] = []
        while self.unacknowledged and self.unacknowledged[0].sequence < upto:
            parcel = self.unacknowledged.popleft()
            self._cursor = max(0, self._cursor - 1)
            self.inflight_bytes -= parcel.nbytes
            done.append(parcel)
        return done

    def resume(self, sequence: int) -> None:
        """Go back to this piece: it and those after it did not come. An outdated wish changes nothing."""
        index = sequence - self.arrived
        if 0 <= index < self._cursor:
            self.resent_bytes += sum(self.unacknowledged[i].nbytes for i in range(index, self._cursor))
            self._cursor = index


class Verdict(Enum):
    TAKE = "take it: it is the next"
    REPEATED = "it came before: drop it"
    GAP = "something before it did not come: drop it"
    NEW_GAP = "something before it did not come: drop it, and ask for that"


class ReceiveLane:
    """The order of the pieces that have arrived."""

    __slots__ = ("_asked", "expected")

    def __init__(self) -> None:
        self.expected = 0
        self._asked = -1

    def judge(self, sequence: int) -> Verdict:
        if sequence == self.expected:
            self.expected += 1
            return Verdict.TAKE
        if sequence < self.expected:
            return Verdict.REPEATED
        if self._asked == self.expected:
            return Verdict.GAP
        self._asked = self.expected
        return Verdict.NEW_GAP

    def probed(self, transmitted: int) -> bool:
        """The sender says how much it sent before this; whether to ask it to go back."""
        if transmitted <= self.expected:
            return False
        self._asked = self.expected
        return True
