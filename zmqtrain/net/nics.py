"""Sharing NICs between processes: the arithmetic of reservations. Sans-IO.

A *NIC* carries a number of bytes per second in one direction: what a host sends, what it receives, what leaves a rack. Bulk data
reserves a NIC for the time that it takes, one piece after another in the order of requests. A piece requests the sender's NIC when
the previous piece has left it, so flows take turns piece by piece. It requests the further NICs when it has left the sender's, as
if a switch between them stored what the next one is too busy for. So a busy receiver delays only those that send to it.

Small urgent messages go between the packets of bulk data, as in a network where each connection has a queue of its own: they wait
only for each other, and the next reservation for bulk data is later by the time that they took.

A piece reserves a further NIC only when the sender's has carried it, for a time that began before. What the NIC has carried since
then delays the piece by the time that it took, and by no more: a NIC remembers its last idle time, which such a piece uses.
Otherwise one acknowledgement that comes in during a tensor would delay the tensor as if it had begun after it.
"""

from __future__ import annotations

from collections.abc import Sequence

#: For each NIC: the end of its reservations, and that of the urgent messages; its last idle time, of which it was busy for a while;
#: from the end of that it is busy until the end of its reservations.
TIMES = 5
_END, _URGENT_END, _IDLE_FROM, _IDLE_UNTIL, _BUSY_FOR = range(TIMES)


class Nics:
    """All NICs of a network. Times are in seconds, on a clock that all users share."""

    def __init__(self, times: list[float] | memoryview[float], rates: Sequence[float]) -> None:
        """``times``: `TIMES` numbers per NIC, initially 0; they may be in shared memory. ``rates``: bytes per second."""
        self._times = times
        self._rates = rates

    def reserve(self, nic: int, nbytes: int, ready: float) -> tuple[float, float]:
        """Reserve the NIC for ``nbytes`` that have been ready since ``ready``. Returns when it carries the first and the last of
        them.

        ``ready`` may be in the past, so that callers that ask a little late lose nothing.
        """
        took, times, nic = nbytes / self._rates[nic], self._times, TIMES * nic
        if ready < times[nic + _END]:
            start = max(times[nic + _IDLE_FROM], ready)
            idle = times[nic + _IDLE_UNTIL] - start - times[nic + _BUSY_FOR]
            if idle > 0:
                if took > idle:
                    times[nic + _IDLE_UNTIL] = start
                    end = times[nic + _END] = times[nic + _END] + took - idle
                else:
                    end = times[nic + _IDLE_FROM] = start + took + times[nic + _BUSY_FOR]
                return start, end
        self._idle_until(nic, ready)
        start = times[nic + _END]
        times[nic + _END] = start + took
        return start, start + took

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
            nic *= TIMES
            own_end = max(now, times[nic + _URGENT_END]) + took
            times[nic + _URGENT_END] = own_end
            self._idle_until(nic, now)
            times[nic + _END] += took
            end = max(end, own_end)
        return end

    def _idle_until(self, nic: int, time: float) -> None:
        """If the NIC has no reservations any more at ``time``, it was idle until then. ``nic``: where its times are.

        The last idle time is remembered. If little was carried between two, they are one, in which the NIC was busy for a while:
        else each small message would hide what was before it. When it was busy then is forgotten, so each piece
        that uses the idle time is taken to have come upon it.
        """
        times = self._times
        end = times[nic + _END]
        if time <= end:
            return
        busy = times[nic + _BUSY_FOR] + end - times[nic + _IDLE_UNTIL]
        if busy > time - end:
            times[nic + _IDLE_FROM], busy = end, 0.0
        times[nic + _BUSY_FOR], times[nic + _IDLE_UNTIL], times[nic + _END] = busy, time, time
