"""One range of memory that the processes of a host share.

It has no name in any file system (``memfd_create``), so a small ``/dev/shm`` does not limit it, and the kernel frees it when the
last process that has it open ends, for whatever reason. It takes real memory page by page as it is written to.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from zmqtrain.arena import futex
from zmqtrain.errors import HostMemoryError

PAGE = mmap.PAGESIZE
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def shared_memory_missing() -> str | None:
    """Why processes on this machine cannot share memory; None if they can."""
    if not hasattr(os, "memfd_create"):
        return f"this system ({sys.platform}) has no memfd_create"
    if not futex.AVAILABLE:
        return "zmqtrain does not know this processor's futex call"
    return None


def available_bytes() -> int:
    """How much memory this process may still use: the machine's, or the rest of the control group's limit."""
    return min(int(psutil.virtual_memory().available), _left_of_control_group())


class Region:
    """Made by one process (`create`), opened by others (`open`) by its `path`. Close it when no view of it is in use any more."""

    def __init__(self, file: int, nbytes: int, path: str) -> None:
        """Not to be called from outside."""
        self.nbytes = nbytes
        self.path = path
        """The path at which other processes open the region, as long as the process that made it lives."""
        self._file = file
        try:
            self._map = mmap.mmap(file, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(file)
            raise HostMemoryError(
                f"cannot map {nbytes / 1e9:.1f} GB of shared memory ({error.strerror}); {_remedy(error)}"
            ) from error

    @classmethod
    def create(cls, nbytes: int, name: str = "zmqtrain") -> Region:
        """A new region, all zeros. ``name`` is shown in ``/proc/PID/maps``. Raises `HostMemoryError`."""
        nbytes = -(-nbytes // PAGE) * PAGE
        try:
            file = os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            raise HostMemoryError(f"cannot make shared memory ({error.strerror}); {_remedy(error)}") from error
        try:
            os.ftruncate(file, nbytes)
        except OSError as error:
            os.close(file)
            raise HostMemoryError(
                f"cannot make {nbytes / 1e9:.1f} GB of shared memory ({error.strerror}); {_remedy(error)}"
            ) from error
        return cls(file, nbytes, f"/proc/{os.getpid()}/fd/{file}")

    @classmethod
    def open(cls, path: str) -> Region:
        """The region of another process. Raises `HostMemoryError` if that process has ended, or belongs to another user."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return cls(file, os.fstat(file).st_size, path)
        except OSError as error:
            raise HostMemoryError(f"cannot open the host's shared memory at {path}: {error.strerror}") from error

    @property
    def memory(self) -> memoryview:
        """The whole region. Closing it while views are in use raises ``BufferError``."""
        return memoryview(self._map)

    def reserve(self, start: int, nbytes: int, what: str) -> None:
        """Allocate real memory for these bytes now, so that no later write kills the process. Raises `HostMemoryError`.

        ``what``: the purpose, for the error's text.
        """
        left = available_bytes()
        if nbytes > left:
            raise HostMemoryError(
                f"{what} needs {nbytes / 1e6:.1f} MB of shared memory, but only {left / 1e6:.1f} MB are left on this host"
            )
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError as error:
            raise HostMemoryError(f"{what} needs {nbytes / 1e6:.1f} MB of shared memory: {error.strerror}") from error

    def discard(self, start: int, nbytes: int) -> None:
        """Give the memory of whole pages back; they read as zeros afterwards."""
        first, last = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
        if first >= last:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (self._file, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(first), ctypes.c_long(last - first))
        if libc.fallocate(*arguments) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code))

    @property
    def identity(self) -> int:
        """A number that no other region of this machine has, the same for all processes that have it open; never 0."""
        found = os.fstat(self._file)
        return (found.st_dev << 32 ^ found.st_ino) & (1 << 63) - 1 or 1

    def resident_bytes(self) -> int:
        """The number of bytes of real memory that the region occupies."""
        return os.fstat(self._file).st_blocks * 512

    def close(self) -> None:
        """Unmap it, unless views still use it, and close the file."""
        with suppress(BufferError):  # tensors are views of it: it is unmapped with the last of them
            self._map.close()
        os.close(self._file)


def _remedy(error: OSError) -> str:
    """What to do about a limit that is too small."""
    limit = {
        errno.ENOMEM: "raise the limit on address space (ulimit -v), or ",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f), or ",
        errno.EMFILE: "raise the limit on open files (ulimit -n), or ",
    }
    return f"{limit.get(error.errno or 0, '')}set [compute] shared_memory = false"


def _left_of_control_group() -> int:
    """What this process's control group (a container's limit) still allows; a very large number if there is none."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # there is no such file, or it contains "max"
            continue
    return 1 << 62
