"""Gradients of the workers of one host meet in memory, bucket by bucket, while backward goes on (TRL/Caffe, Sekiyama et al. 2017).

The way of a bucket, at each of n workers::

    compute thread   its gradients are complete                     -> ARRIVED
    adding lane      when all have ARRIVED: adds up its slice, 1/n of the bucket, over the workers' buffers, in rank order
                     where there are other hosts: the slice is summed with theirs (`between`)
                                                                    -> DONE
    waiting lane     when all are DONE, the whole bucket is summed  -> `on_summed`
    compute thread   updates its parameters by the sums             -> TAKEN

Nobody sends or broadcasts anything within the host: each byte is read once by whoever adds it, and the sums are read where they
lie. Every element is added up by one worker, in the order of ranks, so all workers see the same bits on every run, whatever the
timing.

This is the same in the real and in the simulated world; `zmqtrain.host.member` says how they differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from zmqtrain.collectives.group import bounds
from zmqtrain.host.member import HostMember, Job
from zmqtrain.host.team import Word
from zmqtrain.wire.payload import Payload

#: ``on_summed(index, error)``.
OnSummed: TypeAlias = Callable[[int, BaseException | None], None]
#: ``between(operation, index, slice, done)``.
Between: TypeAlias = Callable[[int, int, Payload, Callable[[], None]], None]


class Accumulator:
    """One worker's part of it. Make one, `start` it, then step by step `writable`, `produced` for each bucket in the same order on
    all workers, `taken` for each; at last the member leaves (`HostMember.leave`)."""

    def __init__(
        self,
        member: HostMember,
        *,
        scale: float = 1.0,
        in_place: bool = True,
        slices: int | None = None,
        between: Between | None = None,
    ) -> None:
        """``scale``: what the sums are multiplied by.

        ``in_place``: sums lie in rank 0's buffers, and all read them there; otherwise every worker's own buffer receives them (for
        those who change them afterwards), which writes them once more for each worker.

        ``between(operation, index, slice, done)`` is called, in a lane, with this host's sum of a slice of ``index``, to be
        summed with those of other hosts. It must not block; ``done()`` is called, from any thread, when that is done.
        ``operation`` is a number that all hosts share. ``slices``: in how many the buckets are divided, where the hosts have
        different numbers of workers; the first workers have one each.
        """
        self.member = member
        self._scale, self._in_place = scale, in_place
        self._slices, self._between = slices or member.size, between
        self._buffers: list[list[Payload]] = []  # bucket -> each member's
        self._on_summed: OnSummed = lambda _index, _error: None
        self._to_add: Callable[[Job], None] = _not_started
        self._to_spread: Callable[[Job], None] = _not_started
        self._to_wait: Callable[[Job], None] = _not_started
        # Operations are numbered; joining the team was the first. Those of several slices may end in another order.
        self._produced = self._taken = self._done = 1
        self._ended: set[int] = set()
        self._ending = threading.Lock()

    async def start(self, buckets: Sequence[Payload], on_summed: OnSummed) -> list[Payload]:
        """Share ``buckets``, and wait until all members have done so. Returns where the sums will lie.

        ``on_summed(index, error)`` is called in a lane once a bucket is summed; ``error``: what went wrong.
        """
        self._buffers = await self.member.share(buckets)
        self._on_summed = on_summed
        self._to_add = self._lane("add", self._add)
        self._to_wait = self._lane("wait", self._wait)
        if self._between is not None and not self._in_place:
            self._to_spread = self._lane("spread", self._spread)
        return [members[0 if self._in_place else self.member.rank] for members in self._buffers]

    # On the compute thread's side.

    async def writable(self) -> None:
        """Wait until nobody reads the sums of the step before, which lie where the next gradients will."""
        if self._in_place and self.member.rank == 0:
            await self.member.wait(Word.TAKEN, self._produced, "the others to update their parameters")

    def produced(self, index: int) -> None:
        """The bucket's gradients are complete. Never blocks."""
        self._produced += 1
        self.member.set(Word.ARRIVED, self._produced)
        self._to_add((self._produced, index))

    def taken(self) -> None:
        """A bucket's sums are not needed any more. Once a bucket, in any order."""
        self._taken += 1
        self.member.set(Word.TAKEN, self._taken)

    # In the lanes.

    def _lane(self, name: str, do: Callable[[int, int], Coroutine[Any, Any, None]]) -> Callable[[Job], None]:
        async def work(job: Job) -> None:
            try:
                await do(*job)
            except Exception as error:  # noqa: BLE001 - it is told to who waits for the bucket
                self._on_summed(job[1], error)

        return self.member.lane(name, work)

    async def _add(self, operation: int, index: int) -> None:
        member = self.member
        await member.wait(Word.ARRIVED, operation, f"the gradients of bucket {index}")
        self._to_wait((operation, index))
        if member.rank < self._slices:
            slices = self._slices_of(index)
            if self._between is None or not slices[0].numel:
                await member.add(slices[:1] if self._in_place else slices, slices, self._scale)
            else:
                await member.add(slices[:1], slices, self._scale)
                self._between(operation, index, slices[0], lambda: self._summed_between(operation, index))
                return
        self._finished(operation)

    def _summed_between(self, operation: int, index: int) -> None:
        """A slice was summed over all hosts, in rank 0's memory."""
        if self._in_place:
            self._finished(operation)
        else:
            self._to_spread((operation, index))

    async def _spread(self, operation: int, index: int) -> None:
        slices = self._slices_of(index)
        await self.member.copy(slices[0], slices[1:])
        self._finished(operation)

    def _finished(self, operation: int) -> None:
        """This worker's slice of an operation is what it must be; others may have been before it."""
        with self._ending:
            self._ended.add(operation)
            while self._done + 1 in self._ended:
                self._done += 1
                self._ended.discard(self._done)
            self.member.set(Word.DONE, self._done)

    async def _wait(self, operation: int, index: int) -> None:
        await self.member.wait(Word.DONE, operation, f"the sums of bucket {index}")
        self._on_summed(index, None)

    def _slices_of(self, index: int) -> list[Payload]:
        """Every member's part of the slice that this worker adds up."""
        members = self._buffers[index]
        start, stop = bounds(members[0].numel, self._slices)[self.member.rank]
        return [each.part(start, stop) for each in members]


def _not_started(job: Job) -> None:
    raise AssertionError("start() comes first")
