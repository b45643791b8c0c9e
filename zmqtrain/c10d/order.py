"""In which order ranks carry out operations that callbacks call.

What a program calls, one call after another, is in the same order on all ranks. A callback of a future runs as soon as its
operation has ended, in a thread, and what it calls falls between other calls as it happens. So each callback has a *stream* of
operations of its own, with a name that is the same on all ranks: it follows from the operation whose future it is. Each operation
says its stream and its number there. Where ranks are about to carry out operations of different streams, all take that of the
first rank, and set theirs aside (`OtherStreamError`). What the first rank's thread has waited for before that call has ended on all
ranks, and no callback keeps others waiting, so the others come to the same call without what they have set aside.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Generic, Protocol, TypeVar

#: The stream of what the program itself calls.
PROGRAM = 0
_HERE = threading.local()


class OtherStreamError(Exception):
    """All ranks carry out the next operation of another stream first. It ends no operation: this one is begun again later."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        super().__init__(f"an operation of stream {stream} comes first")


class Ordered(Protocol):
    """The part of a process group that the order of its operations needs."""

    callbacks: bool
    """Whether a future of one of its operations has a callback. A program's threads attach them in the order of their calls."""

    def size(self) -> int: ...


class Following:
    """What the callbacks of one future call. As a context: one of them runs."""

    def __init__(self, group: Ordered, path: tuple[int, ...]) -> None:
        """``group``: that of the operation. ``path``: which operation, and which callback."""
        self._group, self._path = group, path
        self._counts: dict[Ordered, itertools.count[int]] = {}
        self._outer: list[Following | None] = []

    def next(self, number: int) -> Following:
        """A future has got a callback, with this number. Returns what it calls."""
        self._group.callbacks = True
        return Following(self._group, (*self._path, number))

    def call(self, group: Ordered) -> tuple[int, int]:
        """The stream and the number of the next operation of ``group``."""
        # Ranks of another group may have followed operations of different groups, which have only their size in common.
        name = repr((0 if self._group is group else self._group.size(), self._path))
        stream = int.from_bytes(sha256(name.encode()).digest()[:7]) + 1
        return stream, next(self._counts.setdefault(group, itertools.count(1)))

    def __enter__(self) -> None:
        self._outer.append(getattr(_HERE, "following", None))
        _HERE.following = self

    def __exit__(self, *_: object) -> None:
        _HERE.following = self._outer.pop()


class Streamed(Protocol):
    """An operation that waits for its turn in the order of a stream."""

    @property
    def stream(self) -> int: ...


J = TypeVar("J", bound=Streamed)


class Line(Generic[J]):
    """Operations that wait for their turn. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: deque[J] = deque()
        self._sought: int | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def first(self) -> J:
        """The one that has waited longest."""
        return self._jobs[0]

    @property
    def seeks(self) -> bool:
        """Whether an operation must come first that has not been called yet."""
        return bool(self._jobs) and self._find() is None

    def add(self, job: J) -> None:
        """It comes after all others."""
        self._jobs.append(job)

    def put_back(self, job: J, stream: int) -> None:
        """It comes before all others, but for the next one of ``stream``."""
        self._jobs.appendleft(job)
        self._sought = stream

    def take(self) -> J:
        """Remove the operation whose turn it is, and return it. There must be one."""
        found = self._find()
        assert found is not None, "there is none yet"
        self._jobs.remove(found)
        self._sought = None
        return found

    def give_up(self) -> None:
        """What others take first will not be called here."""
        self._sought = None

    def _find(self) -> J | None:
        return next((job for job in self._jobs if self._sought in (None, job.stream)), None)


def next_call(group: Ordered, count: Callable[[], int]) -> tuple[int, int]:
    """The stream and the number of this thread's next call of ``group``. ``count``: the next number in the program's own stream."""
    here: Following | None = getattr(_HERE, "following", None)
    return (PROGRAM, count()) if here is None else here.call(group)
