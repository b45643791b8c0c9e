"""A timer with a precision of a tenth of a millisecond. Event loops count whole milliseconds, too coarse for a fast network."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
from collections.abc import Callable
from typing import Protocol

from zmqtrain.net.loop import dilation_of

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # equal to TFD_NONBLOCK and TFD_CLOEXEC


class Alarm(Protocol):
    """Calls one function at a given time."""

    def set(self, when: float) -> None:
        """Call the function at this time of the loop's clock, or as soon as possible after it. Replaces an earlier setting."""
        ...

    def close(self) -> None: ...


class LoopAlarm:
    """An alarm with the loop's own timers: up to a millisecond late if those are coarse, exact on virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        self._handle: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        self.close()
        self._handle = self._loop.call_at(when, self._wake)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class RealAlarm:
    """An alarm with a Linux timer file descriptor, which becomes readable in time. Raises `OSError` if the system has none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._settime, create = libc.timerfd_settime, libc.timerfd_create
        except AttributeError as error:
            raise OSError("this system has no timerfd") from error
        self._fd = create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop, self._wake = loop, wake
        self._dilation = dilation_of(loop)
        self._spec = (ctypes.c_long * 4)()  # interval (none), then the time, each in seconds and nanoseconds
        loop.add_reader(self._fd, self._ring)

    def set(self, when: float) -> None:
        left_s = max(1e-9, (when - self._loop.time()) * self._dilation)  # 0 would switch it off
        whole = math.floor(left_s)
        self._spec[2], self._spec[3] = whole, max(1, int((left_s - whole) * 1e9))
        self._settime(self._fd, 0, self._spec, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again in the meantime
            os.read(self._fd, 8)
            self._wake()


def real_alarm(loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> Alarm:
    """The most precise alarm that this system has."""
    try:
        return RealAlarm(loop, wake)
    except OSError:
        return _CoarseAlarm(loop, wake)


class _CoarseAlarm(LoopAlarm):
    """uvloop's timers may fire half a millisecond early; the caller must not be woken repeatedly before its time."""

    def set(self, when: float) -> None:
        tick_s = 0.001 / dilation_of(self._loop)
        super().set(max(when, self._loop.time()) + tick_s)
