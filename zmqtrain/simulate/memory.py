"""The memory that the processes of a simulated host share, in which workers sum gradients, as real ones do in the arena.

The accumulator is the real one (`zmqtrain.host.accumulator`), with the words of a real team. Only what lies below differs: a
process that waits at a word is a task on the virtual loop, and adding a slice takes the time that the memory needs to read and
write its bytes. All simultaneous additions on a host share its memory's rate, which is the planner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.host.team import LOOK_S, Word
from zmqtrain.net.endpoint import PeerId
from zmqtrain.simulate.connection import NO_PROCESS
from zmqtrain.simulate.flows import Flow, Resource
from zmqtrain.simulate.lockstep import current_lockstep_thread
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.topology.links import MEMORY_BYTE_S
from zmqtrain.wire.payload import Payload

if TYPE_CHECKING:  # it imports torch
    from zmqtrain.host.member import Job

T = TypeVar("T")
#: The address of a word: its slot, team and name.
At: TypeAlias = tuple[int, int, Word]


class HostMemory:
    """The memory of one host: each process's place in it, and the rate at which it is read and written."""

    def __init__(self, host: str, network: SimulatedNetwork) -> None:
        self._resource = Resource(f"memory of {host}", 1 / MEMORY_BYTE_S)
        self._network, self._loop = network, network.loop
        self._places: dict[int, ProcessMemory] = {}
        self._waiting: dict[At, dict[asyncio.Future[None], int]] = {}  # waiters, with the value for which each waits

    def enter(self, peer: PeerId, slot: int) -> ProcessMemory:
        """The place of a process that starts. Nothing is left of a previous process in the slot."""
        place = self._places[slot] = ProcessMemory(self, peer, slot)
        return place

    def at(self, slot: int) -> ProcessMemory | None:
        """The process that has this slot, or had it last; None before the first."""
        return self._places.get(slot)

    def lose(self, peer: PeerId) -> None:
        """The process was killed: what it still does has no effect here. Others notice within `LOOK_S`."""
        for place in self._places.values():
            if place.peer == peer:
                place.end()

    async def changed(self, at: At, value: int, until: float) -> None:
        """Sleep until a word has ``value``, a process has ended, a process has given up, or the loop's time is ``until``."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(at, {})[future] = value
        timer = self._loop.call_at(until, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._waiting[at].pop(future, None)

    def has_come(self, at: At, value: int) -> None:
        """A word has ``value``: wake those who wait for that."""
        for future, awaited in self._waiting.get(at, {}).items():
            if value >= awaited:
                _wake(future)

    def wake(self) -> None:
        """Let all waiters check again."""
        for waiting in self._waiting.values():
            for future in waiting:
                _wake(future)

    def wake_later(self) -> None:
        """Call `wake` at the time when waiters check whether the others are alive."""
        self._loop.call_later(LOOK_S, self.wake, context=NO_PROCESS)

    async def move(self, nbytes: int) -> None:
        """Take the time to read and write ``nbytes`` bytes in total."""
        if nbytes:
            await _Work(self._network, self._resource).run(nbytes)


class ProcessMemory:
    """What one process shows to the others of its host."""

    def __init__(self, memory: HostMemory, peer: PeerId, slot: int) -> None:
        self.memory, self.peer, self.slot = memory, peer, slot
        self.ended = False
        """Whether the process has ended."""
        self.buckets: dict[int, Sequence[Payload]] = {}
        """Keyed by the number of the team."""
        self._words: dict[tuple[int, Word], int] = {}

    def get(self, team: int, word: Word) -> int:
        """The value of one of its words."""
        return self._words.get((team, word), 0)

    def set(self, team: int, word: Word, value: int) -> None:
        """Write a word, and wake the waiters. A process that has ended writes nothing."""
        if not self.ended:
            self._words[team, word] = value
            self.memory.has_come((self.slot, team, word), value)

    def end(self) -> None:
        """The process has ended."""
        if not self.ended:
            self.ended = True
            self.memory.wake_later()


class SimulatedMember:
    """Implements `zmqtrain.host.member.HostMember` on the virtual loop."""

    def __init__(
        self, place: ProcessMemory, timeout_s: float, slots: Sequence[int], rank: int, names: Sequence[PeerId], number: int
    ) -> None:
        """
        Args:
            place: this process's place.
            timeout_s: how long a wait may last.
            slots, rank, names, number: as in `zmqtrain.host.team.Team`.
        """
        if place.slot != slots[rank]:
            raise ValueError(f"rank {rank} of the team has slot {slots[rank]}, but this process has slot {place.slot}")
        self._place, self._memory, self._timeout_s = place, place.memory, timeout_s
        self._slots, self._rank, self._names, self._number = tuple(slots), rank, tuple(names), number
        self._loop = asyncio.get_running_loop()
        self._lanes: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._slots)

    async def share(self, buckets: Sequence[Payload]) -> list[list[Payload]]:
        self._place.buckets[self._number] = buckets
        for word in (Word.DONE, Word.TAKEN, Word.ARRIVED):
            self.set(word, 1)
        await self.wait(Word.ARRIVED, 1, "the processes of this host to share their memory")
        places = [self._memory.at(slot) for slot in self._slots]
        return [[place.buckets[self._number][index] for place in places if place is not None] for index in range(len(buckets))]

    def set(self, word: Word, value: int) -> None:
        self._place.set(self._number, word, value)

    async def wait(self, word: Word, value: int, what: str) -> None:
        deadline = self._loop.time() + self._timeout_s
        for member in range(self.size):
            while not self._reached(member, word, value):
                self._look(what)
                if self._loop.time() >= deadline:
                    raise PeerTimeoutError(self._names[member], what, self._timeout_s, "[job] timeout")
                await self._memory.changed((self._slots[member], self._number, word), value, deadline)
        if self._error is not None:
            raise self._error

    async def add(self, targets: Sequence[Payload], sources: Sequence[Payload], scale: float) -> None:
        await self._memory.move((len(sources) + len(targets)) * sources[0].nbytes)
        first = targets[0]
        for source in sources[1:]:
            first.add_(source)
        if scale != 1.0:
            first.scale_(scale)
        for target in targets[1:]:
            target.copy_(first)

    async def copy(self, source: Payload, targets: Sequence[Payload]) -> None:
        await self._memory.move((1 + len(targets)) * source.nbytes)
        for target in targets:
            target.copy_(source)

    def lane(self, name: str, work: Callable[[Job], Coroutine[Any, Any, None]]) -> Callable[[Job], None]:
        jobs: asyncio.Queue[Job] = asyncio.Queue()

        async def main() -> None:
            while True:
                await work(await jobs.get())

        self._lanes.append(self._loop.create_task(main(), name=f"host {name}"))
        return jobs.put_nowait

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        return current_lockstep_thread().complete(work)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await work

    def abort(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._memory.wake()

    async def leave(self, timeout_s: float) -> None:
        for lane in self._lanes:
            lane.cancel()
        if self._lanes:
            await asyncio.wait(self._lanes, timeout=timeout_s)
        self.set(Word.LEFT, 1)

    def _reached(self, member: int, word: Word, value: int) -> bool:
        place = self._memory.at(self._slots[member])
        return place is not None and place.get(self._number, word) >= value

    def _look(self, what: str) -> None:
        """Like `zmqtrain.host.team.Team.look`."""
        if self._error is not None:
            raise self._error
        others = [
            (self._names[member], place)
            for member, slot in enumerate(self._slots)
            if member != self._rank and (place := self._memory.at(slot)) is not None
        ]
        for name, place in others:
            if place.ended:
                raise PeerLostError(name, "its process has ended", waiting_for=what)
        for name, place in others:
            if place.get(self._number, Word.LEFT):
                raise PeerLostError(name, "it has left", waiting_for=what)


class _Work(Flow):
    """A number of bytes to be read and written once."""

    __slots__ = ("_done", "_network", "_timer")

    def __init__(self, network: SimulatedNetwork, resource: Resource) -> None:
        super().__init__((resource,))
        self._network = network
        self._timer: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] = network.loop.create_future()

    async def run(self, nbytes: int) -> None:
        """Returns when all bytes have been moved."""
        self._network.flows.start(self, nbytes, self._network.loop.time())
        self._network.rebalance()
        try:
            await self._done
        finally:
            self._stop()

    def reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._network.loop.call_at(self.finishes_at, self._through, context=NO_PROCESS)

    def _through(self) -> None:
        self._stop()  # at once, so that a paused process keeps no other from the memory
        _wake(self._done)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._network.flows.stop(self)
        self._network.rebalance()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
