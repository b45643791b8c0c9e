"""One gate a bucket: closed while its gradients and parameters belong to the exchange."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from zmqtrain.data.background import Condition
from zmqtrain.errors import PeerTimeoutError


class Gate(Enum):
    """Where a bucket stands."""

    OPEN = "open"  # the compute thread's: parameters may be read, gradients are zero or being accumulated
    CLOSED = "closed"  # the exchange's
    ARRIVED = "arrived"  # given back; the compute thread has not taken it yet


class Gates:
    """Hands buckets between the compute thread and the loop's thread.

    ``close`` and ``take`` are called in compute threads, ``arrive`` on the loop's, ``abort`` from anywhere.
    """

    def __init__(self, count: int, timeout_s: float, *, condition: Condition, clock: Callable[[], float]) -> None:
        """``condition`` and ``clock``: the device's (`zmqtrain.train.device.base.Device`)."""
        self._states = [Gate.OPEN] * count
        self._timeout_s = timeout_s
        self._changed = condition
        self._clock = clock
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._states)

    def state(self, index: int) -> Gate:
        return self._states[index]

    def close(self, index: int) -> None:
        with self._changed:
            self._states[index] = Gate.CLOSED

    def arrive(self, index: int) -> None:
        """The exchange gives the bucket back."""
        with self._changed:
            self._states[index] = Gate.ARRIVED
            self._changed.notify_all()

    def take(self, index: int) -> float:
        """Wait until the bucket is not closed, and own it. Returns the seconds waited.

        Raises `PeerTimeoutError` after the time-out, or what ``abort`` was given.
        """
        waited_s = 0.0
        if self._error is not None:
            raise self._error
        if self._states[index] is Gate.CLOSED:
            start = self._clock()
            with self._changed:
                arrived = self._changed.wait_for(
                    lambda: self._error is not None or self._states[index] is not Gate.CLOSED, self._timeout_s
                )
            waited_s = self._clock() - start
            if self._error is not None:
                raise self._error
            if not arrived:
                raise PeerTimeoutError("the exchange", f"the parameters of bucket {index}", self._timeout_s)
        self._states[index] = Gate.OPEN
        return waited_s

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
