"""Waiting for buckets in a thread: the compute thread takes what the event loop's thread gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zmqtrain.data.background import Condition
from zmqtrain.errors import PeerTimeoutError
from zmqtrain.parallel.turns import handing_over
from zmqtrain.train.bucket_machine import BucketMachine, Do, State


class Gates:
    """One gate per bucket of a `BucketMachine`, closed while the exchange owns the bucket's gradients and parameters.

    ``take`` is called in the compute thread, ``answered`` on the loop's thread, and ``abort`` in any thread.
    """

    def __init__(
        self,
        machine: BucketMachine,
        timeout_s: float,
        *,
        condition: Condition,
        clock: Callable[[], float],
        peer: str = "the exchange",
        setting: str = "[job] timeout",
    ) -> None:
        """
        Args:
            timeout_s: how long `take` waits.
            condition, clock: those of the device (`zmqtrain.train.device.base.Device`).
            peer, setting: for the time-out's error: who has not answered, and which setting to change.
        """
        self._machine, self._timeout_s = machine, timeout_s
        self._changed, self._clock = condition, clock
        self._peer, self._setting = peer, setting

    def answered(self, bucket: int) -> None:
        """The exchange returns the bucket."""
        with self._changed:
            self._machine.answered(bucket)
            self._changed.notify_all()

    def all_answered(self) -> None:
        """The exchange returns all buckets."""
        with self._changed:
            for bucket in range(len(self._machine)):
                self._machine.answered(bucket)
            self._changed.notify_all()

    def take(self, bucket: int) -> tuple[Sequence[Do], float]:
        """Wait until the bucket is not closed, and take it. Returns what `BucketMachine.take` returns, and the seconds waited.

        Raises `PeerTimeoutError` after the time-out, or the error given to ``abort``.
        """
        machine, waited_s = self._machine, 0.0
        todo = machine.take(bucket)
        if todo is None:
            start = self._clock()
            with handing_over(), self._changed:  # in a divided model's forward others must be able to go on with theirs
                self._changed.wait_for(
                    lambda: machine.error is not None or machine.state(bucket) is not State.CLOSED, self._timeout_s
                )
            waited_s = self._clock() - start
            todo = machine.take(bucket)
        if todo is None:
            raise PeerTimeoutError(self._peer, f"the parameters of bucket {bucket}", self._timeout_s, self._setting)
        return todo, waited_s

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``."""
        with self._changed:
            self._machine.abort(error)
            self._changed.notify_all()
