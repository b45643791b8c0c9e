"""Who may send when over NICs that several processes share: the arithmetic of reservations. Sans-IO.

A *NIC* carries a number of bytes per second in one direction: what a host sends, what it gets, what leaves a rack. Bulk reserves a
NIC for as long as it takes, one piece after another in the order of asking. A piece asks for the sender's NIC when the one before
it is through, so flows take turns piece by piece; and it asks for the NICs behind that one when it has left the sender's, as if a
switch between them kept what the next is too busy for. So a busy receiver delays only those that send to it.

Small urgent messages go between the packets of bulk, as they do on a network where each connection has a queue of its own: they
wait for each other only, and what bulk asks for next begins later by what they took.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Per NIC: until when it is reserved, and until when for urgent messages.
TIMES = 2


class Nics:
    """All NICs of a network. Times in seconds, on one clock for all who share them."""

    def __init__(self, times: list[float] | memoryview[float], rates: Sequence[float]) -> None:
        """``times``: `TIMES` numbers a NIC, at first 0; they may lie in shared memory. ``rates``: bytes a second."""
        self._times = times
        self._rates = rates

    def reserve(self, nic: int, nbytes: int, ready: float) -> tuple[float, float]:
        """From when to when ``nbytes`` that are ready since ``ready`` have the NIC.

        ``ready`` may lie in the past, so that nothing is lost to those who are a little late to ask.
        """
        start = max(self._times[TIMES * nic], ready)
        end = start + nbytes / self._rates[nic]
        self._times[TIMES * nic] = end
        return start, end

    def follow(self, nics: Sequence[int], nbytes: int, start: float, end: float) -> float:
        """When the last of ``nbytes`` has passed ``nics``, one behind the other, after a NIC that carried them from ``start`` to
        ``end``.

        A NIC need not wait for the last byte before it begins; but a fast one begins so late that it never waits in between, and
        has time for others.
        """
        for nic in nics:
            start, end = self.reserve(nic, nbytes, max(start, end - nbytes / self._rates[nic]))
        return end

    def slip(self, nics: Sequence[int], nbytes: int, now: float) -> float:
        """When a small urgent message that begins now has passed ``nics``."""
        end = now
        times = self._times
        for nic in nics:
            took = nbytes / self._rates[nic]
            own_end = max(now, times[TIMES * nic + 1]) + took
            times[TIMES * nic + 1] = own_end
            times[TIMES * nic] = max(now, times[TIMES * nic]) + took
            end = max(end, own_end)
        return end
