"""Keeps a process that will fork at one thread."""

from __future__ import annotations

import os
import sys

#: OpenBLAS reads it when it is loaded.
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def import_numpy() -> None:
    """Import numpy, whose BLAS starts a thread for each processor otherwise, with one thread."""
    if "numpy" in sys.modules:
        return
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        if before is None:
            del os.environ[_BLAS_THREADS]
        else:
            os.environ[_BLAS_THREADS] = before


def threads() -> int | None:
    """How many threads this process has, those of libraries included; ``None`` where the kernel does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None
