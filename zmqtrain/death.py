"""Nothing may outlive the run: on Linux the kernel ends a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even by kill -9. ``parent``: the parent's process id.

    Elsewhere than on Linux it does nothing: there a closed pipe tells the forkserver and the agents.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before we had asked
        os.kill(os.getpid(), signal.SIGKILL)
