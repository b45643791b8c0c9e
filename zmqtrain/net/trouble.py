"""Connections that do not come about: why, and when to tell people of them. Sans-IO."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from zmqtrain.net.endpoint import PeerId

#: A peer that starts, or has not heard of this one yet, turns it away for a moment; that is not worth a word.
USUAL_S = 1.0
#: Between two lines of a log about the same thing.
PAUSE_S = 10.0
#: Addresses of callers that are remembered between two lines, and named in one.
MAX_ORIGINS, NAMED_ORIGINS = 256, 3


class Trouble(Enum):
    """Why a peer cannot be connected to, and what to do."""

    UNLISTED = "it does not have this process's key on its list, which the coordinator gives out: has this process joined the run?"
    OTHER_KEY = (
        "it breaks the handshake off: another process is at its address now, or this one was told a wrong key for it "
        "(is ZMQTRAIN_COORDINATOR that of this run?)"
    )
    PLAIN = (
        "it speaks in plain text, and this run is encrypted: another process is at its address (is ZMQTRAIN_COORDINATOR that of "
        "this run?)"
    )
    ENCRYPTED = (
        "it lets nobody in without encryption: start this process with the run's own ZMQTRAIN_COORDINATOR, which ends in the "
        "coordinator's key"
    )
    GARBLED = "what answers at its address does not speak as it must: another program listens there"


class Intrusion(Enum):
    """What is wrong with a caller that is not let in."""

    NO_KEY = "in plain text, or broken off before they said anything"
    WRONG_KEY = "for a process with another key"
    UNLISTED = "with a key that is not on the list"
    FALSE_NAME = "under another member's name"


class Troubles:
    """What is wrong with the peers that this process tries to connect to."""

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[Trouble, float]] = {}  # and since when
        self._told: dict[PeerId, float] = {}

    def note(self, peer: PeerId, trouble: Trouble, now: float) -> bool:
        """One more attempt has failed. Returns whether to tell of it."""
        since = self._known[peer][1] if peer in self._known else now
        self._known[peer] = trouble, since
        if now < since + USUAL_S or now < self._told.get(peer, float("-inf")) + PAUSE_S:
            return False
        self._told[peer] = now
        return True

    def over(self, peer: PeerId) -> None:
        """The connection exists, or is no longer wanted."""
        self._known.pop(peer, None)
        self._told.pop(peer, None)

    def why(self, peer: PeerId) -> str:
        """What is wrong with the peer, in words; empty: nothing."""
        return self._known[peer][0].value if peer in self._known else ""


class Intruders:
    """Callers that were not let in, counted, for a line about them now and then."""

    def __init__(self) -> None:
        self._counts: Counter[Intrusion] = Counter()
        self._origins: dict[str, None] = {}
        self._told_at = float("-inf")

    def note(self, intrusion: Intrusion, origin: str) -> None:
        """One more; ``origin`` is where it came from, or empty."""
        self._counts[intrusion] += 1
        if origin and len(self._origins) < MAX_ORIGINS:
            self._origins[origin] = None

    def due(self, now: float) -> float:
        """When to tell of one that has just come: not at once, as there may be more, and never often."""
        return max(now + USUAL_S, self._told_at + PAUSE_S)

    def tell(self, now: float) -> str | None:
        """A line about all since the last one, if there were any."""
        if not self._counts:
            return None
        self._told_at = now
        total = sum(self._counts.values())
        each = ", ".join(f"{count} {kind.value}" for kind, count in self._counts.most_common())
        named = list(self._origins)[:NAMED_ORIGINS]
        more = len(self._origins) - len(named)
        origins = f" from {', '.join(named)}{f' and {more} more' if more else ''}" if named else ""
        self._counts.clear()
        self._origins.clear()
        return (
            f"{total} connection{'s' * (total > 1)}{origins} not let in: {each}. The run is not disturbed; if one was meant "
            "to be part of it, start it with this run's ZMQTRAIN_COORDINATOR and ZMQTRAIN_TOKEN"
        )
