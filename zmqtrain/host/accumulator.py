"""Gradients of the workers of one host meet in memory, bucket by bucket, while backward goes on (TRL/Caffe, Sekiyama et al. 2017).

The way of a bucket, at each of n workers::

    compute thread   its gradients are complete                     -> ARRIVED
    adding thread    when all have ARRIVED: adds up its slice, 1/n of the bucket, over the workers' buffers, in rank order
                     where there are other hosts: the slice is summed with theirs (`between`)
                                                                    -> DONE
    waiting thread   when all are DONE, the whole bucket is summed  -> `on_summed`
    compute thread   updates its parameters by the sums             -> TAKEN

Nobody sends or broadcasts anything within the host: each byte is read once by whoever adds it, and the sums are read where they
lie. Every element is added up by one worker, in the order of ranks, so all workers see the same bits on every run, whatever the
timing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from zmqtrain.arena.arena import Place
from zmqtrain.collectives.group import bounds
from zmqtrain.host.sums import sum_into
from zmqtrain.host.team import Team, Word
from zmqtrain.wire.tensor import TensorPayload

#: ``on_summed(index, error)``.
OnSummed: TypeAlias = Callable[[int, BaseException | None], None]
#: ``between(operation, index, slice, done)``.
Between: TypeAlias = Callable[[int, int, TensorPayload, Callable[[], None]], None]


class Accumulator:
    """One worker's part of it. Make one, `start` it, then step by step `wait_writable`, `produced` for each bucket in the same
    order on all workers, `taken` for each; at last `close`."""

    def __init__(
        self,
        team: Team,
        *,
        scale: float = 1.0,
        in_place: bool = True,
        threads: int = 1,
        slices: int | None = None,
        between: Between | None = None,
    ) -> None:
        """``scale``: what the sums are multiplied by; ``threads`` add up a slice.

        ``in_place``: sums lie in rank 0's buffers, and all read them there; otherwise every worker's own buffer receives them (for
        those who change them afterwards), which writes them once more for each worker.

        ``between(operation, index, slice, done)`` is called, in a thread, with this host's sum of a slice of ``index``, to be
        summed with those of other hosts. It must not block; ``done()`` is called, from any thread, when that is done.
        ``operation`` is a number that all hosts share. ``slices``: in how many the buckets are divided, where the hosts have
        different numbers of workers; the first workers have one each.
        """
        self.team = team
        self._scale, self._in_place, self._threads = scale, in_place, threads
        self._slices, self._between = slices or team.size, between
        self._buffers: list[list[Tensor]] = []  # bucket -> each member's
        self._on_summed: OnSummed = lambda _index, _error: None
        self._to_add: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()  # operation and bucket
        self._to_wait: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._threads_running = [
            threading.Thread(target=self._work, args=work, name=f"zmqtrain-host-{name}", daemon=True)
            for name, work in (("add", (self._to_add, self._add)), ("wait", (self._to_wait, self._wait)))
        ]
        # Operations are numbered; joining the team was the first. Those of several slices may end in another order.
        self._produced = self._taken = self._done = 1
        self._ended: set[int] = set()
        self._ending = threading.Lock()

    def start(self, buckets: Sequence[TensorPayload], on_summed: OnSummed) -> list[TensorPayload]:
        """Share ``buckets``, which must lie in the arena. Blocks until all members have done so. Returns where the sums will lie.

        ``on_summed(index, error)`` is called in a thread of this accumulator's once a bucket is summed; ``error``: what went wrong.
        """
        arena = self.team.arena
        places = [arena.place_of(bucket.pointer, bucket.nbytes) for bucket in buckets]
        assert None not in places, "gradients of workers that share memory lie in it"
        tables = self.team.join([place for place in places if place is not None])
        for index, bucket in enumerate(buckets):
            self._buffers.append([self._tensor(table[index], bucket.tensor.dtype) for table in tables])
        self._on_summed = on_summed
        for thread in self._threads_running:
            thread.start()
        return [TensorPayload.of(members[0 if self._in_place else self.team.rank]) for members in self._buffers]

    # Called in the compute thread.

    def wait_writable(self) -> None:
        """Wait until nobody reads the sums of the step before, which lie where the next gradients will."""
        if self._in_place and self.team.rank == 0:
            self.team.wait(Word.TAKEN, self._produced, "the others to update their parameters")

    def produced(self, index: int) -> None:
        """The bucket's gradients are complete. Never blocks."""
        self._produced += 1
        self.team.set(Word.ARRIVED, self._produced)
        self._to_add.put((self._produced, index))

    def taken(self) -> None:
        """A bucket's sums are not needed any more. Once a bucket, in any order."""
        self._taken += 1
        self.team.set(Word.TAKEN, self._taken)

    # From any thread.

    def abort(self, error: BaseException) -> None:
        """Whoever waits here, now or later, is told ``error``."""
        self.team.abort(error)

    def close(self, timeout_s: float) -> None:
        """End the threads, and leave the team. Blocks until the threads have ended, at most ``timeout_s``."""
        self._to_add.put(None)
        self._to_wait.put(None)
        for thread in self._threads_running:
            if thread.is_alive():
                thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads_running):
            self.team.leave()

    def _work(self, jobs: queue.SimpleQueue[tuple[int, int] | None], do: Callable[[int, int], None]) -> None:
        torch.set_num_threads(self._threads)
        while (job := jobs.get()) is not None:
            try:
                do(*job)
            except Exception as error:  # noqa: BLE001 - it is told to who waits for the bucket
                self._on_summed(job[1], error)

    def _add(self, operation: int, index: int) -> None:
        team, members = self.team, self._buffers[index]
        team.wait(Word.ARRIVED, operation, f"the gradients of bucket {index}")
        self._to_wait.put((operation, index))
        if team.rank < self._slices:
            start, stop = bounds(members[0].numel(), self._slices)[team.rank]
            slices = [each[start:stop] for each in members]
            if self._between is None or stop == start:
                sum_into(slices[:1] if self._in_place else slices, slices, scale=self._scale)
            else:
                sum_into(slices[:1], slices, scale=self._scale)
                self._between(operation, index, TensorPayload.of(slices[0]), lambda: self._spread(operation, slices))
                return
        self._finished(operation)

    def _spread(self, operation: int, slices: list[Tensor]) -> None:
        """A slice was summed over all hosts, in rank 0's memory."""
        if not self._in_place:
            for other in slices[1:]:
                other.copy_(slices[0])
        self._finished(operation)

    def _finished(self, operation: int) -> None:
        """This worker's slice of an operation is what it must be; others may have been before it."""
        with self._ending:
            self._ended.add(operation)
            while self._done + 1 in self._ended:
                self._done += 1
                self._ended.discard(self._done)
            self.team.set(Word.DONE, self._done)

    def _wait(self, operation: int, index: int) -> None:
        self.team.wait(Word.DONE, operation, f"the sums of bucket {index}")
        self._on_summed(index, None)

    def _tensor(self, place: Place, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.team.arena.memory(place), dtype=dtype)
