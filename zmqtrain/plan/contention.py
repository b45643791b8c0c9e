"""Groups that delay each other: the time of an update when several groups send to the same servers, round by round.

The law of `zmqtrain.plan.efficiency` gives the limit. But groups that begin together also send together, as long as their times are
alike: all push while none reads, and a NIC that carries both directions is used in one direction at a time. So a few rounds are
simulated, with NICs whose bandwidth is shared evenly, and servers that serve one request at a time. The path of a bucket is that of
`zmqtrain.plan.overlapped`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import ceil

from zmqtrain.plan.overlapped import BucketWay, LayerLoad
from zmqtrain.plan.queues import Begin, Line, Nic, Queues

#: The number of rounds of all groups, and the share of them before the measurement begins.
ROUNDS, SETTLING = 40, 0.3
#: Limits on simulated events and rounds, so that a plan takes seconds.
EVENTS, FEWEST_ROUNDS = 20_000, 6


@dataclass(frozen=True, slots=True)
class Shared:
    """The resources that all groups share."""

    nic_byte_s: float = 0.0
    """Seconds per byte of a group's parameters on the servers' busiest NIC, in each direction."""
    fc_nic_byte_s: float = 0.0
    """Seconds per byte of a group's activations on the FC server's NIC, in each direction."""
    one_nic: bool = True
    """Whether both are the same NIC."""


@dataclass(frozen=True, slots=True)
class Fc:
    """The work of a merged FC server between a group's forward and its backward."""

    seconds: float
    """Seconds of computing in a group's turn."""
    nbytes: float
    """Bytes of the activations; their gradients have the same size."""
    own_byte_s: float
    """Seconds per byte if no other group sends."""
    latency_s: float = 0.0
    """Seconds of latency of a message."""
    tell_s: float = 0.0
    """Seconds before the turn in which the first of several FC servers passes the batch on, if no other group sends."""
    exchange_s: float = 0.0
    """Seconds after the turn in which FC servers exchange results, if no other group sends."""
    update_s: float = 0.0
    """Seconds of the update after the answer, before the next group's turn."""

    @property
    def path_s(self) -> float:
        """The total time if no other group sends."""
        return self.tell_s + self.seconds + self.exchange_s + 2 * (self.nbytes * self.own_byte_s + self.latency_s)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The computation and the messages of a group in one step."""

    loads: Sequence[LayerLoad]
    buckets: Sequence[Sequence[int]]
    way: BucketWay
    fc: Fc | None = None
    overlap: bool = True

    def sizes(self) -> list[float]:
        """The bytes of each bucket."""
        return [sum(self.loads[layer].nbytes for layer in layers) for layers in self.buckets]

    def pieces(self, nbytes: float) -> int:
        """The number of pieces in which a bucket goes to the servers and back."""
        return max(1, ceil(nbytes / self.way.piece_bytes))


#: Draws the factor on the computing time of a group's next step.
Factor = Callable[[random.Random], float]


def update_s(works: Sequence[GroupWork], shared: Shared, factor: Factor, depth: int = 1) -> float:
    """Seconds between updates of groups with these steps. ``depth``: the number of groups that take turns on the same slots."""
    events = depth * sum(2 * len(work.loads) + sum(4 + 4 * work.pieces(size) for size in work.sizes()) for work in works)
    rounds = max(FEWEST_ROUNDS, min(ROUNDS, EVENTS // max(1, events)))
    cluster = _Cluster(shared)
    slots = [Line(cluster.queues) for _ in works]
    groups = [
        _Group(cluster, work, slots[number], random.Random(f"contention/{number + turn * len(works)}"), factor)
        for turn in range(depth)
        for number, work in enumerate(works)
    ]
    for group in groups:
        cluster.queues.start(group.live(rounds))
    cluster.queues.run()
    over = min(group.ends[-1] for group in groups)  # when the first group has finished; afterwards there are fewer
    rate = sum(_rate([end for end in group.ends if end <= over], over) for group in groups)
    return 1 / rate if rate else 0.0


def _rate(ends: Sequence[float], over: float) -> float:
    """Steps per second, from the times at which they ended."""
    first = int(SETTLING * len(ends))
    if len(ends) - first < 2 or ends[-1] <= ends[first]:
        return len(ends) / over if over else 0.0
    return (len(ends) - 1 - first) / (ends[-1] - ends[first])


class _Cluster:
    def __init__(self, shared: Shared) -> None:
        self.shared, self.queues = shared, Queues()
        self.into, self.out = Nic(self.queues), Nic(self.queues)
        self.fc_into, self.fc_out = (self.into, self.out) if shared.one_nic else (Nic(self.queues), Nic(self.queues))
        self.updates, self.fc = Line(self.queues), Line(self.queues)


class _Group:
    def __init__(self, cluster: _Cluster, work: GroupWork, slot: Line, chance: random.Random, factor: Factor) -> None:
        self._cluster, self._work, self._slot, self._chance, self._factor = cluster, work, slot, chance, factor
        self._queues = cluster.queues
        self._sizes = work.sizes()
        self._there = [True] * len(work.buckets)
        self._awaited: tuple[int, Callable[[], None]] | None = None
        self._ring, self._push, self._read = (Line(self._queues) for _ in range(3))
        self.ends: list[float] = []

    def live(self, rounds: int) -> Generator[Begin, None, None]:
        """Run step after step."""
        work, queues = self._work, self._queues
        bucket_of = {layer: number for number, layers in enumerate(work.buckets) for layer in layers}
        completes = {min(layers): number for number, layers in enumerate(work.buckets)}
        for _ in range(rounds):
            factor, seconds = self._factor(self._chance), 0.0
            yield self._slot.take()
            for number in range(len(work.buckets)) if not work.overlap else ():
                yield from self._parameters(number)
            for index, load in enumerate(work.loads):
                if index in bucket_of and not self._there[bucket_of[index]]:
                    yield queues.sleep(seconds)
                    seconds = 0.0
                    yield from self._parameters(bucket_of[index])
                seconds += load.forward_s * factor
            yield queues.sleep(seconds)
            if work.fc is not None:
                self._slot.give()
                yield from self._fully_connected(work.fc)
                yield self._slot.take()
            seconds, ready = 0.0, []
            for index in reversed(range(len(work.loads))):
                seconds += work.loads[index].backward_s * factor
                if index in completes:
                    ready.append(completes[index])
                    if work.overlap:
                        yield queues.sleep(seconds)
                        seconds = 0.0
                        queues.start(self._exchange(ready.pop()))
                        self._there[completes[index]] = False
            yield queues.sleep(seconds)
            for number in ready:
                self._there[number] = False
                queues.start(self._exchange(number))
            self._slot.give()
            self.ends.append(queues.now)

    def _parameters(self, number: int) -> Generator[Begin, None, None]:
        """Wait for a bucket's parameters; other groups may use the slot in the meantime."""
        if not self._there[number]:
            self._slot.give()
            yield self._until_there(number)
            yield self._slot.take()

    def _until_there(self, number: int) -> Begin:
        def begin(go_on: Callable[[], None]) -> None:
            if self._there[number]:
                go_on()
            else:
                self._awaited = number, go_on

        return begin

    def _fully_connected(self, fc: Fc) -> Generator[Begin, None, None]:
        cluster = self._cluster
        yield cluster.fc_into.carry(fc.nbytes, fc.own_byte_s, cluster.shared.fc_nic_byte_s)
        yield self._queues.sleep(fc.latency_s)
        yield self._turn(fc)
        yield cluster.fc_out.carry(fc.nbytes, fc.own_byte_s, cluster.shared.fc_nic_byte_s)
        yield self._queues.sleep(fc.latency_s)

    def _turn(self, fc: Fc) -> Begin:
        """A turn, which ends with the answer. The next group's turn begins only after the update."""
        cluster, queues = self._cluster, self._queues

        def begin(go_on: Callable[[], None]) -> None:
            def answered(over: Callable[[], None]) -> None:
                go_on()
                queues.at(fc.update_s, over)

            def carried(nic: Nic, seconds: float) -> Generator[Begin, None, None]:
                yield nic.carry(seconds, 1.0, 1.0)

            def turn() -> Generator[Begin, None, None]:
                if fc.tell_s:
                    yield from carried(cluster.fc_out, fc.tell_s)
                yield queues.sleep(fc.seconds)
                if fc.exchange_s:
                    yield queues.together([carried(nic, fc.exchange_s) for nic in (cluster.fc_into, cluster.fc_out)])
                yield answered

            queues.start(cluster.fc.taken(0, queues.together([turn()])))

        return begin

    def _exchange(self, number: int) -> Generator[Begin, None, None]:
        """The path of a bucket. Of several waiting buckets, the last in order goes first: the next forward needs it first."""
        way, size, queues = self._work.way, self._sizes[number], self._queues
        if way.ring_byte_s:
            yield from self._ring.taken(-number, queues.sleep(size * way.ring_byte_s))
        pieces = self._work.pieces(size)
        yield queues.together([self._piece(number, size / pieces) for _ in range(pieces)])
        if way.ring_byte_s:
            yield from self._ring.taken(-number, queues.sleep(size * way.ring_byte_s))
        yield queues.sleep(way.latency_s)
        self._there[number] = True
        if self._awaited is not None and self._awaited[0] == number:
            _, go_on = self._awaited
            self._awaited = None
            go_on()

    def _piece(self, number: int, nbytes: float) -> Generator[Begin, None, None]:
        way, cluster, byte_s = self._work.way, self._cluster, self._cluster.shared.nic_byte_s
        yield from self._push.taken(-number, cluster.into.carry(nbytes, way.push_byte_s, byte_s))
        if way.update_byte_s:
            yield from cluster.updates.taken(0, self._queues.sleep(nbytes * way.update_byte_s))
        yield from self._read.taken(-number, cluster.out.carry(nbytes, way.read_byte_s, byte_s))
