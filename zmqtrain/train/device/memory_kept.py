"""A process that computes keeps the memory that it has freed: the next step needs just as much again."""

from __future__ import annotations

import ctypes
from functools import cache

#: glibc's mallopt: blocks up to so large come from the heap, so much of the heap's end may be free, and there is one heap.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_LARGEST_BLOCK, _MOST_FREE = 1 << 30, (1 << 31) - 1


@cache
def keep_memory() -> bool:
    """Ask the C library to keep freed memory, once for the whole process. Returns whether it does (glibc only).

    Otherwise each large activation is mapped anew from the kernel, page by page, in every step: a third of the time of a small
    convolutional network. The process keeps as much as it has ever needed at once. Threads that have no heap of their own yet
    share one from now on, since theirs cannot hold large blocks.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_BLOCK), (_TRIM_THRESHOLD, _MOST_FREE), (_ARENA_MAX, 1))
    kept = [mallopt(*setting) == 1 for setting in settings]
    return all(kept)
