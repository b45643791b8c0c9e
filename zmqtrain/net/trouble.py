"""Failed connections: their reasons, and when to report them. Sans-IO."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from zmqtrain.net.endpoint import PeerId

#: A peer that is starting, or has not been told of this one yet, refuses it for a moment; that is not reported.
USUAL_S = 1.0
#: Seconds between two log lines about the same problem.
PAUSE_S = 10.0
#: The same for callers that are not admitted: strangers must not fill a log.
INTRUDERS_PAUSE_S = 60.0
#: Addresses of callers that are remembered between two lines, and named in one.
MAX_ORIGINS, NAMED_ORIGINS = 256, 3


class Trouble(Enum):
    """Why a peer cannot be reached, and what to do."""

    UNLISTED = "this process's key is not on its list, which the coordinator distributes: has this process joined the run?"
    OTHER_KEY = (
        "it aborts the handshake: another process is at its address now, or this process has a wrong key for it "
        "(is ZMQTRAIN_COORDINATOR that of this run?)"
    )
    PLAIN = (
        "it uses plain text, but this run is encrypted: another process is at its address (is ZMQTRAIN_COORDINATOR that of "
        "this run?)"
    )
    ENCRYPTED = (
        "it accepts only encrypted connections: start this process with the run's own ZMQTRAIN_COORDINATOR, which ends in the "
        "coordinator's key"
    )
    FILES = (
        "this process has as many files open as it may, and each process that it is connected to takes up to ten: raise the hard "
        "limit (ulimit -Hn, or LimitNOFILE= of its systemd unit)"
    )
    GARBLED = "the answer from its address is not valid: another program is listening there"


class Intrusion(Enum):
    """What is wrong with a caller that is not admitted."""

    NO_TOKEN = "without the run's token"
    NO_KEY = "in plain text, or disconnected before they sent anything"
    WRONG_KEY = "for a process with another key"
    UNLISTED = "with a key that is not on the list"
    FALSE_NAME = "under another member's name"
    GARBAGE = "none of zmqtrain's"
    BAD_REQUEST = "requests with other arguments than the method takes"

    @property
    def of_admitted(self) -> bool:
        """Whether the caller was admitted, and only what it sent is wrong."""
        return self in (Intrusion.GARBAGE, Intrusion.BAD_REQUEST)


class Troubles:
    """What is wrong with the peers to which this process tries to connect."""

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[Trouble, float]] = {}  # the problem, and since when
        self._told: dict[PeerId, float] = {}

    def note(self, peer: PeerId, trouble: Trouble, now: float) -> bool:
        """Another attempt has failed. Returns whether to report it."""
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

    def of(self, peer: PeerId) -> Trouble | None:
        """What is wrong with the peer, if anything is known."""
        return self._known[peer][0] if peer in self._known else None

    def why(self, peer: PeerId) -> str:
        """What is wrong with the peer, in words; empty if nothing."""
        return self._known[peer][0].value if peer in self._known else ""


class Intruders:
    """Counts callers that were not admitted, for an occasional log line about them."""

    def __init__(self) -> None:
        self._counts: Counter[Intrusion] = Counter()
        self._origins: dict[str, None] = {}
        self._told_at = float("-inf")

    def note(self, intrusion: Intrusion, origin: str) -> None:
        """Count a caller; ``origin`` is where it came from, or empty."""
        self._counts[intrusion] += 1
        if origin and len(self._origins) < MAX_ORIGINS:
            self._origins[origin] = None

    def due(self, now: float) -> float:
        """When to report a caller that has just come: not at once, as there may be more, and never often."""
        return max(now + USUAL_S, self._told_at + INTRUDERS_PAUSE_S)

    def tell(self, now: float) -> str | None:
        """A line about all callers since the last one, if there were any."""
        if not self._counts:
            return None
        self._told_at = now
        named = list(self._origins)[:NAMED_ORIGINS]
        more = len(self._origins) - len(named)
        origins = f" from {', '.join(named)}{f' and {more} more' if more else ''}" if named else ""
        connections = Counter({kind: count for kind, count in self._counts.items() if not kind.of_admitted})
        messages = self._counts - connections
        self._counts = Counter()
        self._origins.clear()
        told = []
        if connections:
            told.append(f"{_counted(connections, 'connection', origins)} not admitted: {_each(connections)}.")
        if messages:
            told.append(f"{_counted(messages, 'message', '' if connections else origins)} not taken: {_each(messages)}.")
        told.append("The run is not affected")
        if connections:
            told[-1] += "; if one was meant to be part of it, start it with this run's ZMQTRAIN_COORDINATOR and ZMQTRAIN_TOKEN"
        return " ".join(told)


def _counted(counts: Counter[Intrusion], what: str, origins: str) -> str:
    total = sum(counts.values())
    return f"{total} {what}{'s' * (total > 1)}{origins}"


def _each(counts: Counter[Intrusion]) -> str:
    return ", ".join(f"{count} {kind.value}" for kind, count in counts.most_common())
