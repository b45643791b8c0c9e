"""What the C library does with memory that a process frees: keep it for the next step or message, or give it to the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

#: Options of glibc's mallopt: the size up to which blocks come from the heap, the free memory kept at its end, the number of heaps.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_LARGEST_BLOCK, _MOST_FREE = 1 << 30, (1 << 31) - 1
#: The most to which the C library raises the first two by itself, as it sees blocks freed.
_LARGEST_BY_ITSELF, _MOST_FREE_BY_ITSELF = 32 << 20, 64 << 20


@cache
def keep_memory() -> bool:
    """Ask the C library to keep freed memory, once for the whole process. Returns whether it does (glibc only).

    Otherwise the kernel maps each large activation anew, page by page, in every step, which takes a third of the time of a small
    convolutional network. The process then keeps as much memory as it has ever needed at once. Threads without a heap of their own
    share one from now on, since separate heaps cannot hold large blocks.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_BLOCK), (_TRIM_THRESHOLD, _MOST_FREE), (_ARENA_MAX, 1))
    kept = [mallopt(*setting) == 1 for setting in settings]
    return all(kept)


@cache
def keep_frames() -> bool:
    """Ask the C library to keep memory for the frames of large messages, once for the whole process. Returns whether it does.

    ZeroMQ allocates each frame anew. Having seen a frame of 1 MiB freed, the C library keeps 2 MiB of free memory at the end of a
    heap, so whenever a few frames are free at once, the kernel takes their pages back, and clears others for the next ones. With
    these settings it keeps up to 64 MiB in each heap, as it does by itself after a block of 32 MiB.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    if keep_memory.cache_info().currsize:
        return keep_memory()  # even more
    settings = ((_MMAP_THRESHOLD, _LARGEST_BY_ITSELF), (_TRIM_THRESHOLD, _MOST_FREE_BY_ITSELF))
    kept = [mallopt(*setting) == 1 for setting in settings]
    return all(kept)


@contextmanager
def returning_blocks(nbytes: int) -> Iterator[None]:
    """A context in which freed blocks of this size and more go back to the kernel at once (glibc only, in the whole process).

    Of many such blocks, of which each lives for a moment, the heap would keep as many holes, each a little too small for the next
    one."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, nbytes)
    try:
        yield
    finally:
        if mallopt is not None:
            kept = keep_memory.cache_info().currsize and keep_memory()
            mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK if kept else _LARGEST_BY_ITSELF)


def give_back() -> None:
    """Return all free memory to the kernel now, holes in the heap included (glibc only), because it is not needed soon."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _mallopt() -> Callable[..., int] | None:
    return _function("mallopt")


def _function(name: str) -> Callable[..., int] | None:
    """The C library's function of this name; ``None`` if it has none."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
