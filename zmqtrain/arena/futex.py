"""Waiting at a word in shared memory until another process changes it: Linux's futex, through ``ctypes``.

The standard library cannot wait in memory that several processes have mapped: its locks and conditions belong to one process, and
those of ``multiprocessing`` are semaphores, which count, and at which a broadcast to many waiters is not possible.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import sys

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
#: A call releases the interpreter's lock, so the process's other threads continue while one waits.
_syscall = ctypes.CDLL(None, use_errno=True).syscall if _number is not None else None

#: Whether this system and processor have futexes that we know how to call.
AVAILABLE = _number is not None


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at ``address`` holds ``value``, until a `wake` or until ``timeout_s`` has passed.

    May return early for no reason: read the word again. Returns at once if the word holds another value, so a `wake` between
    reading the word and this call is not missed.
    """
    assert _syscall is not None
    seconds = math.floor(timeout_s)
    time = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    if _syscall(_number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(time), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, f"futex wait: {os.strerror(code)}")


def wake(address: int) -> None:
    """Wake all threads, in any process, that wait at the word."""
    assert _syscall is not None
    _syscall(_number, ctypes.c_void_p(address), _WAKE, ctypes.c_uint32(_ALL_WAITERS), None, None, 0)
