"""Sequence numbers of one lane: exactly once and in order, over a transport that may lose what was in flight. Sans-IO.

The sender keeps every piece (by reference) until it is acknowledged, and goes back to the first missing one if asked. The receiver
accepts pieces in order only. A transport loses pieces silently, so the sender *probes* over the same lane after a reconnect or a
long silence, and the receiver sees from the probe's number what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from zmqtrain.errors import WireError
from zmqtrain.wire.message import Header

Owner = TypeVar("Owner")


@dataclass(slots=True)
class Parcel(Generic[Owner]):
    """One piece on its way. Its frames alias the sender's memory until it is acknowledged."""

    sequence: int
    frames: Sequence[bytes | memoryview]
    nbytes: int
    owner: Owner
    wire_bytes: int
    """The bytes that the transport carries: fewer than ``nbytes`` if the data is in shared memory."""
    header: Header | None
    """What the first frame encodes."""


#: The queue of every lane on which nothing is on its way. An empty deque takes 624 bytes, and of the four lanes of a link most are
#: never used, which counts with thousands of simulated links. Nothing is ever added to it.
_EMPTY: Final[deque[Any]] = deque(maxlen=0)


class SendLane(Generic[Owner]):
    """Pieces that were passed to the transport, and those that must be sent again."""

    __slots__ = (
        "_furthest",
        "_hurried",
        "cursor",
        "hurried_from",
        "inflight_bytes",
        "next_sequence",
        "resent_bytes",
        "unacknowledged",
    )

    def __init__(self) -> None:
        self.unacknowledged: deque[Parcel[Owner]] = _EMPTY
        self.cursor = 0
        """How many of these the transport has taken; it should take the others."""
        self._furthest = 0  # every piece below this number was passed on at least once
        self._hurried = 0  # every piece below this number is acknowledged soon after it has arrived
        self.hurried_from = 0
        """The first piece of those that are to be acknowledged soon."""
        self.next_sequence = 0
        self.inflight_bytes = 0
        self.resent_bytes = 0

    @property
    def arrived(self) -> int:
        """Every piece below this number was acknowledged."""
        return self.next_sequence - len(self.unacknowledged)

    @property
    def transmitted(self) -> int:
        """Every piece below this number was passed to the transport."""
        return self.arrived + self.cursor

    @property
    def hurried(self) -> bool:
        """Whether the peer is to acknowledge something soon."""
        return self.next_sequence - len(self.unacknowledged) < self._hurried

    @property
    def unhurried(self) -> bool:
        """Whether there is something that the peer may acknowledge later."""
        return bool(self.unacknowledged) and self._hurried < self.next_sequence

    def hurry(self) -> None:
        """The peer is to acknowledge everything up to here soon."""
        if not self.hurried:
            self.hurried_from = max(self._hurried, self.arrived)
        self._hurried = self.next_sequence

    def add(
        self,
        frames: Sequence[bytes | memoryview],
        nbytes: int,
        owner: Owner,
        *,
        wire_bytes: int | None = None,
        header: Header | None = None,
        hurried: bool = True,
    ) -> Parcel[Owner]:
        """``hurried``: the peer will soon acknowledge it; otherwise with its next message."""
        parcel = Parcel(self.next_sequence, frames, nbytes, owner, nbytes if wire_bytes is None else wire_bytes, header)
        if hurried:
            if not self.hurried:
                self.hurried_from = self.next_sequence
            self._hurried = self.next_sequence + 1
        self.next_sequence += 1
        self.inflight_bytes += nbytes
        if self.unacknowledged is _EMPTY:
            self.unacknowledged = deque()
        self.unacknowledged.append(parcel)
        return parcel

    def peek(self) -> Parcel[Owner] | None:
        """The piece that the transport should take next."""
        return self.unacknowledged[self.cursor] if self.cursor < len(self.unacknowledged) else None

    def advance(self) -> None:
        """The transport has taken the piece that `peek` returned."""
        self.cursor += 1
        transmitted = self.next_sequence - len(self.unacknowledged) + self.cursor
        if transmitted > self._furthest:
            self._furthest = transmitted

    def acknowledge(self, upto: int) -> list[Parcel[Owner]]:
        """All pieces below ``upto`` have arrived. Returns those that had not been acknowledged before.

        They may be ahead of `transmitted`: pieces that were considered lost, so that we went back, were only late.
        """
        if upto > self._furthest:
            raise WireError(f"piece {upto - 1} was acknowledged, but only {self._furthest} were sent")
        done: list[Parcel[Owner]] = []
        parcels = self.unacknowledged
        while parcels and parcels[0].sequence < upto:
            parcel = parcels.popleft()
            self.inflight_bytes -= parcel.nbytes
            done.append(parcel)
        if done:
            self.cursor = max(0, self.cursor - len(done))
            if not parcels:
                self.unacknowledged = _EMPTY
        return done

    def clear(self) -> None:
        """Nothing is sent any more."""
        self.unacknowledged, self.cursor = _EMPTY, 0

    def resume(self, sequence: int) -> None:
        """Go back to this piece: it and those after it did not arrive. An outdated request changes nothing."""
        index = sequence - self.arrived
        if 0 <= index < self.cursor:
            self.resent_bytes += sum(self.unacknowledged[i].nbytes for i in range(index, self.cursor))
            self.cursor = index


class Verdict(Enum):
    TAKE = "take it: it is the next one"
    REPEATED = "it arrived before: drop it"
    GAP = "an earlier piece is missing: drop it"
    NEW_GAP = "an earlier piece is missing: drop it, and ask for that one"


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
        """The sender says how much it sent before this. Returns whether to ask it to go back."""
        if transmitted <= self.expected:
            return False
        self._asked = self.expected
        return True
