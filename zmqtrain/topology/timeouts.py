"""The time-outs: all of them from the one number in the topology file.

A shorter time-out expires before a longer one, so that the error a user sees names the cause: a host that went away is *lost*
before the request that waits for it times out, and a request gives up before the barrier that contains it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

#: The most pings a second from the coordinator to all members together, and as many from these.
MOST_PINGS = 100


@dataclass(frozen=True, slots=True)
class TimeoutRow:
    """One line of the printed table."""

    name: str
    seconds: float
    purpose: str


_PURPOSES = {
    "heartbeat_s": "an agent tells the coordinator that its host and roles are alive (of over 100 hosts, less often)",
    "ping_s": "connected processes ask each other for a sign of life; after three without an answer their link is down "
    "(with the coordinator of over 200 processes, less often)",
    "flush_s": "an endpoint that closes sends the messages that are still queued",
    "silent_s": "a host's agent says nothing; after this time the host counts as lost",
    "grace_s": "roles that were told to stop end by themselves; after this time they are killed",
    "connect_s": "a machine answers the check before the run",
    "lost_s": "a link is down (its process stands still, or nothing gets through); after this time it counts as lost",
    "request_s": "a peer answers a request",
    "join_s": "all roles start and join; a peer connects for the first time",
    "barrier_s": "all members reach a barrier (others may be evaluating or writing a checkpoint meanwhile)",
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time-outs in seconds, by default from the shortest to the longest."""

    heartbeat_s: float
    ping_s: float
    flush_s: float
    silent_s: float
    grace_s: float
    connect_s: float
    lost_s: float
    request_s: float
    join_s: float
    barrier_s: float

    @classmethod
    def of(cls, timeout_s: float) -> Timeouts:
        """All time-outs, for ``[job] timeout``."""
        return cls(
            heartbeat_s=min(1.0, timeout_s / 20),
            ping_s=min(2.0, timeout_s / 20),
            flush_s=min(5.0, timeout_s / 12),
            # Noticed within 10 s by default; more patience is had by a longer timeout, and less is wrong on a busy machine.
            silent_s=max(min(8.0, timeout_s / 2), timeout_s * 2 / 15),
            grace_s=min(10.0, timeout_s / 6),
            connect_s=timeout_s / 3,
            lost_s=timeout_s / 2,
            request_s=timeout_s,
            join_s=timeout_s * 2,
            barrier_s=timeout_s * 10,
        )

    def ping_for(self, members: int) -> float:
        """The interval of pings between the coordinator and each of so many members: longer in a large run, but a link is known to
        be down within `lost_s`. (That a whole host has vanished shows by its agent's silence.)"""
        return max(self.ping_s, min(members / MOST_PINGS, self.lost_s / 3))

    def rows(self) -> list[TimeoutRow]:
        """The table that ``zmqtrain check`` prints."""
        return [
            TimeoutRow(field.name.removesuffix("_s"), getattr(self, field.name), _PURPOSES[field.name]) for field in fields(self)
        ]
