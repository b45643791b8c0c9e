"""Sharing NICs between processes: the arithmetic of reservations. Sans-IO.

A *NIC* carries a number of bytes per second in one direction: what a host sends, what it receives, what leaves a rack. Bulk data
reserves a NIC for the time that it takes, one piece after another in the order of requests. A piece requests the sender's NIC when
the previous piece has left it, so flows take turns piece by piece. It requests the further NICs when it has left the sender's, as
if a switch between them stored what the next one is too busy for. So a busy receiver delays only those that send to it.

Small urgent messages go between the packets of bulk data, as in a network where each connection has a queue of its own: they wait
only for each other, and the next reservation for bulk data is later by the time that they took.
"""

from __future__ import annotations

from collections.abc import Sequence

#: For each NIC: the end of its reservations, and that of the urgent messages.
TIMES = 2


class Nics:
    """All NICs of a network. Times are in seconds, on a clock that all users share."""

    def __init__(self, times: list[float] | memoryview[float], rates: Sequence[float]) -> None:
        """``times``: `TIMES` numbers per NIC, initially 0; they may be in shared memory. ``rates``: bytes per second."""
        self._times = times
        self._rates = rates

    def reserve(self, nic: int, nbytes: int, ready: float) -> tuple[float, float]:
        """Reserve the NIC for ``nbytes`` that have been ready since ``ready``. Returns start and end.

        ``ready`` may be in the past, so that callers that ask a little late lose nothing.
        """
        start = max(self._times[TIMES * nic], ready)
        end = start + nbytes / self._rates[nic]
        self._times[TIMES * nic] = end
        return start, end

    def follow(self, nics: Sequence[int], nbytes: int, start: float, end: float) -> float:
        """When the last of ``nbytes`` has passed ``nics``, one after another, after a NIC that carried them from ``start`` to
        ``end``.

        A NIC need not wait for the last byte before it starts; but a fast one starts so late that it never waits in between, and
        has time for others.
        """
        for nic in nics:
            start, end = self.reserve(nic, nbytes, max(start, end - nbytes / self._rates[nic]))
        return end

    def slip(self, nics: Sequence[int], nbytes: int, now: float) -> float:
        """When a small urgent message that starts now has passed ``nics``."""
        end = now
        times = self._times
        for nic in nics:
            took = nbytes / self._rates[nic]
            own_end = max(now, times[TIMES * nic + 1]) + took
            times[TIMES * nic + 1] = own_end
            times[TIMES * nic] = max(now, times[TIMES * nic]) + took
            end = max(end, own_end)
        return end
