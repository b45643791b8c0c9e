"""The end of processes: on Linux the kernel ends a process with its parent, and tells when one has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Processes that are killed may have started others; so often they are looked for.
_ROUNDS = 5


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even by kill -9. ``parent``: the parent's process id.

    Elsewhere than on Linux it does nothing: there a closed pipe tells the forkserver and the agents.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we had asked
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Take back `die_with_parent`: this process sees its parent's end by other means, and has something left to do then."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_descendants() -> None:
    """On Linux, processes below this one whose parents end become its children, wherever they have moved in the meantime."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_pidfd(process: int) -> int | None:
    """Open a file descriptor that becomes readable when a process ends.

    ``process``: its number. Returns ``None`` where there are none (before Linux 5.3, in some sandboxes, on other systems). Raises
    `ProcessLookupError` if there is no such process.
    """
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def end_group(leader: int) -> None:
    """Kill what is left of the process group that ``leader`` has made."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_descendants() -> None:
    """Kill all processes below this one, and wait for them."""
    import psutil

    for _ in range(_ROUNDS):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
