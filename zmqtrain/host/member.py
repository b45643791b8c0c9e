"""What an accumulator works with: a worker's place among the workers of its host that sum gradients in the same memory.

The accumulator's steps are coroutines, written once. How they wait, and what an addition does, depends on the world:

===========  ==========================================  ==========================================
world        waiting                                     adding
===========  ==========================================  ==========================================
real         a thread sleeps at a word in shared memory  done at once, in a thread beside the loop
simulated    a task sleeps on the virtual loop           takes the time that the memory would need
===========  ==========================================  ==========================================

`ArenaMember` is the real one. Its coroutines never suspend: they block the thread that runs them (`complete`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from zmqtrain.data.background import BackgroundThread
from zmqtrain.host.sums import sum_into
from zmqtrain.host.team import Team, Word
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

T = TypeVar("T")
#: The number of an operation, and a bucket.
Job: TypeAlias = tuple[int, int]


class HostMember(Protocol):
    """A worker's place in a team. Call `share` once, then any of the others; at the end `leave`."""

    @property
    def rank(self) -> int:
        """This worker's rank in the team."""
        ...

    @property
    def size(self) -> int:
        """The number of workers in the team."""
        ...

    async def share(self, buckets: Sequence[Payload]) -> list[list[Payload]]:
        """Show the others these buckets, and wait until all have shared theirs. This is each member's first operation.

        Returns, for each bucket, every member's payload, in the order of ranks.
        """
        ...

    def set(self, word: Word, value: int) -> None:
        """This member's counter ``word`` reaches ``value``. May be called in any thread; never blocks."""
        ...

    async def wait(self, word: Word, value: int, what: str) -> None:
        """Wait until the counter ``word`` of all members has reached ``value``. ``what`` is waited for, for the error's text.

        Raises `PeerLostError`, `PeerTimeoutError`, or the error given to `abort`.
        """
        ...

    async def add(self, targets: Sequence[Payload], sources: Sequence[Payload], scale: float) -> None:
        """Every target becomes ``scale`` times the sum of the sources, added from the first to the last. ``targets[0]`` is
        ``sources[0]``; each other target may be another source, or none."""
        ...

    async def copy(self, source: Payload, targets: Sequence[Payload]) -> None:
        """Copy ``source`` to every target."""
        ...

    def lane(self, name: str, work: Callable[[Job], Coroutine[Any, Any, None]]) -> Callable[[Job], None]:
        """A thread or task that runs ``work`` for one job after another until `leave`. ``work`` raises nothing.

        Returns the function that submits a job; it may be called in any thread, and never blocks.
        """
        ...

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end while the calling thread, which must not be the loop's, waits. Returns its result."""
        ...

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end while the loop continues. Returns its result."""
        ...

    def abort(self, error: BaseException) -> None:
        """Every wait of this worker, now and later, raises ``error``. May be called in any thread."""
        ...

    async def leave(self, timeout_s: float) -> None:
        """End the lanes, waiting for them at most ``timeout_s`` seconds; from then on the others' waits for this worker raise."""
        ...


#: ``(slots, rank, names, number)``: the place of rank ``rank`` in the team of this host with this number, as `Team` takes them.
MakeMember: TypeAlias = Callable[[Sequence[int], int, Sequence[PeerId], int], HostMember]


class ArenaMember:
    """Implements `HostMember` in memory that the processes of a host really share."""

    def __init__(self, team: Team, *, threads: int = 1) -> None:
        """``threads``: the number of torch's threads that add a slice."""
        self.team, self._threads = team, threads
        self._lanes: list[tuple[threading.Thread, queue.SimpleQueue[Job | None]]] = []
        self._background: BackgroundThread | None = None

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def size(self) -> int:
        return self.team.size

    async def share(self, buckets: Sequence[Payload]) -> list[list[Payload]]:
        arena, found = self.team.arena, []
        for bucket in buckets:
            place = arena.place_of(_tensor(bucket).pointer, bucket.nbytes)
            assert place is not None, "gradients of workers that share memory must be in it"
            found.append(place)
        tables = self.team.join(found)
        return [
            [TensorPayload.received(arena.memory(table[index]), bucket.dtype, (bucket.numel,)) for table in tables]
            for index, bucket in enumerate(buckets)
        ]

    def set(self, word: Word, value: int) -> None:
        self.team.set(word, value)

    async def wait(self, word: Word, value: int, what: str) -> None:
        self.team.wait(word, value, what)

    async def add(self, targets: Sequence[Payload], sources: Sequence[Payload], scale: float) -> None:
        sum_into([_tensor(each).tensor for each in targets], [_tensor(each).tensor for each in sources], scale=scale)

    async def copy(self, source: Payload, targets: Sequence[Payload]) -> None:
        for target in targets:
            target.copy_(source)

    def lane(self, name: str, work: Callable[[Job], Coroutine[Any, Any, None]]) -> Callable[[Job], None]:
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

        def main() -> None:
            torch.set_num_threads(self._threads)
            while (job := jobs.get()) is not None:
                self.complete(work(job))

        thread = threading.Thread(target=main, name=f"zmqtrain-host-{name}", daemon=True)
        self._lanes.append((thread, jobs))
        thread.start()
        return jobs.put

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("a coroutine that runs in a thread must wait by blocking it")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._background is None:
            self._background = BackgroundThread("zmqtrain-host-run")
        return await self._background.submit(lambda: self.complete(work))

    def abort(self, error: BaseException) -> None:
        self.team.abort(error)

    async def leave(self, timeout_s: float) -> None:
        background = self._background or BackgroundThread("zmqtrain-host-run")
        await background.submit(lambda: self.close(timeout_s))
        await background.close(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Like `leave`, for a thread for which no loop waits: blocks until the lanes have ended, at most ``timeout_s`` seconds."""
        for _, jobs in self._lanes:
            jobs.put(None)
        for thread, _ in self._lanes:
            thread.join(timeout_s)
        if not any(thread.is_alive() for thread, _ in self._lanes):
            self.team.leave()


def _tensor(payload: Payload) -> TensorPayload:
    assert isinstance(payload, TensorPayload), "the payload must be in memory"
    return payload
