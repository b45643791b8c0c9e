"""One timer that is exact to a tenth of a millisecond. The event loops' own count whole ones, too coarse for a fast network."""

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
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # TFD_NONBLOCK and TFD_CLOEXEC are these


class Alarm(Protocol):
    """Calls one function at a given time."""

    def set(self, when: float) -> None:
        """At this time of the loop's clock, or as soon after it as can be; an earlier setting counts no more."""
        ...

    def close(self) -> None: ...


class LoopAlarm:
    """With the loop's own timers: a millisecond late where those are coarse, exact on virtual time."""

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
    """With a file descriptor of Linux that becomes readable in time. Raises `OSError` where there is no such thing."""

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
        with contextlib.suppress(BlockingIOError):  # it was set anew since
            os.read(self._fd, 8)
            self._wake()


def real_alarm(loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> Alarm:
    """The best that this system has."""
    try:
        return RealAlarm(loop, wake)
    except OSError:
        return _CoarseAlarm(loop, wake)


class _CoarseAlarm(LoopAlarm):
    """uvloop's timers may be half a millisecond early; who asked for a time must not be woken before it again and again."""

    def set(self, when: float) -> None:
        tick_s = 0.001 / dilation_of(self._loop)
        super().set(max(when, self._loop.time()) + tick_s)
