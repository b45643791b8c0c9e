"""Gradients of one host's workers are summed in shared memory, bucket by bucket, during backward (TRL/Caffe, Sekiyama et al. 2017).

The life of a bucket, at each of n workers::

    compute thread   its gradients are complete                     -> ARRIVED
    adding lane      when all have ARRIVED: adds its slice, 1/n of the bucket, over the workers' buffers, in rank order
                     if there are other hosts: the slice is summed with theirs (`between`)
                                                                    -> DONE
    waiting lane     when all are DONE, the whole bucket is summed  -> `on_summed`
    compute thread   updates its parameters with the sums           -> TAKEN

Nothing is sent or broadcast within the host: each byte is read once by the worker that adds it, and the sums are read in place.
Every element is summed by one worker, in the order of ranks, so all workers see the same bits in every run, whatever the
timing.

This is the same in the real and in the simulated world; `zmqtrain.host.member` explains how they differ.
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
    """One worker's part in the summation. Make one, `start` it, then in each step `writable`, `produced` for each bucket in the
    same order on all workers, and `taken` for each; at the end the member leaves (`HostMember.leave`)."""

    def __init__(
        self,
        member: HostMember,
        *,
        scale: float = 1.0,
        in_place: bool = True,
        slices: int | None = None,
        between: Between | None = None,
    ) -> None:
        """
        Args:
            scale: the factor on the sums.
            in_place: sums are in rank 0's buffers, where all read them; otherwise every worker's own buffer receives them (for
                workers that change them afterwards), which takes another write per worker.
            between: ``between(operation, index, slice, done)`` is called in a lane with this host's sum of a slice of ``index``, to
                be summed with those of other hosts. It must not block; ``done()`` is called in any thread when that is done.
                ``operation`` is a number that is the same on all hosts.
            slices: the number of slices of a bucket, if the hosts have different numbers of workers; the first workers have one
                each.
        """
        self.member = member
        self._scale, self._in_place = scale, in_place
        self._slices, self._between = slices or member.size, between
        self._buffers: list[list[Payload]] = []  # bucket -> each member's buffer
        self._on_summed: OnSummed = lambda _index, _error: None
        self._to_add: Callable[[Job], None] = _not_started
        self._to_spread: Callable[[Job], None] = _not_started
        self._to_wait: Callable[[Job], None] = _not_started
        # Operations are numbered; joining the team was the first. Those with several slices may end in another order.
        self._produced = self._taken = self._done = 1
        self._ended: set[int] = set()
        self._ending = threading.Lock()

    async def start(self, buckets: Sequence[Payload], on_summed: OnSummed) -> list[Payload]:
        """Share ``buckets``, and wait until all members have done so. Returns the payloads that will hold the sums.

        ``on_summed(index, error)`` is called in a lane once a bucket is summed; ``error`` is None, or what went wrong.
        """
        self._buffers = await self.member.share(buckets)
        self._on_summed = on_summed
        self._to_add = self._lane("add", self._add)
        self._to_wait = self._lane("wait", self._wait)
        if self._between is not None and not self._in_place:
            self._to_spread = self._lane("spread", self._spread)
        return [members[0 if self._in_place else self.member.rank] for members in self._buffers]

    # Calls by the compute thread.

    async def writable(self) -> None:
        """Wait until the sums of the previous step are no longer read, since the next gradients go to the same memory."""
        if self._in_place and self.member.rank == 0:
            await self.member.wait(Word.TAKEN, self._produced, "the others to update their parameters")

    def produced(self, index: int) -> None:
        """The bucket's gradients are complete. Never blocks."""
        self._produced += 1
        self.member.set(Word.ARRIVED, self._produced)
        self._to_add((self._produced, index))

    def taken(self) -> None:
        """A bucket's sums are not needed any more. Call it once per bucket, in any order."""
        self._taken += 1
        self.member.set(Word.TAKEN, self._taken)

    # In the lanes.

    def _lane(self, name: str, do: Callable[[int, int], Coroutine[Any, Any, None]]) -> Callable[[Job], None]:
        async def work(job: Job) -> None:
            try:
                await do(*job)
            except Exception as error:  # noqa: BLE001 - passed to the waiter for the bucket
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
        """This worker's slice of an operation is complete; later operations may have ended before."""
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
        """Every member's part of the slice that this worker adds."""
        members = self._buffers[index]
        start, stop = bounds(members[0].numel, self._slices)[self.member.rank]
        return [each.part(start, stop) for each in members]


def _not_started(job: Job) -> None:
    raise AssertionError("start() comes first")
