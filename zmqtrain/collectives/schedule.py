"""Which rank sends which elements to which other rank, step by step. Pure functions of sizes and ranks; `call.py` executes them.

Rules that every schedule keeps (``tests/collectives/test_schedule.py`` checks them by following the messages):

* Step s of one rank matches step s of its partners: the spans are equal, so pieces of equal size meet in the same order.
* The additions to an element happen in one order, whatever the timing. One rank computes its final sum, which is copied to the
  others; in `doubling` all ranks compute it, with the same tree of commutative additions. So all ranks get identical bits.
* Memory that was sent is overwritten only by a message that could not exist if the sent one had not arrived (the sum that comes
back
  contains what was sent). So the memory of a message on its way never changes. `Step.copied` marks the one exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.collectives.group import bounds

#: Elements start to stop.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """Send ``out`` to one rank and, at the same time, receive ``into`` from another. Either may be missing."""

    to: int | None = None
    out: tuple[Span, ...] = ()
    source: int | None = None
    into: tuple[Span, ...] = ()
    add: bool = False
    """Whether received elements are added; otherwise they replace the existing ones."""

    @property
    def copied(self) -> bool:
        """Whether the same step overwrites what it sends, so that a copy must be sent."""
        return any(a < d and c < b for a, b in self.out for c, d in self.into)


Schedule: TypeAlias = Sequence[Step]


def ring_reduce_scatter(numel: int, size: int, rank: int) -> list[Step]:
    """Part ``rank`` is finally summed on ``rank``: each part travels once around the ring and collects all ranks' contributions.

    Part c starts at rank c + 1, so it is summed in the order c + 1, c + 2, ..., c. Each rank sends (p-1)/p of the elements.
    """
    parts = bounds(numel, size)
    return [
        Step(
            to=(rank + 1) % size,
            out=(parts[(rank - 1 - step) % size],),
            source=(rank - 1) % size,
            into=(parts[(rank - 2 - step) % size],),
            add=True,
        )
        for step in range(size - 1)
    ]


def ring_all_gather(numel: int, size: int, rank: int) -> list[Step]:
    """Part ``rank`` of each rank reaches all, from neighbour to neighbour."""
    parts = bounds(numel, size)
    return [
        Step(
            to=(rank + 1) % size,
            out=(parts[(rank - step) % size],),
            source=(rank - 1) % size,
            into=(parts[(rank - 1 - step) % size],),
        )
        for step in range(size - 1)
    ]


def ring_all_reduce(numel: int, size: int, rank: int) -> list[Step]:
    """Both rings in succession: every rank sends 2(p-1)/p of the elements, which is the minimum.

    What a rank sent of part c while it was summed is overwritten only by the final part c, which contains that contribution.
    """
    return ring_reduce_scatter(numel, size, rank) + ring_all_gather(numel, size, rank)


def bruck_all_gather(numel: int, size: int, rank: int) -> list[Step]:
    """All-gather in ceil(log2 p) steps for any p (Bruck et al. 1997): in step k a rank passes on the 2^k parts that it has.

    Parts are in their final place from the start, so nothing is rotated at the end: a run beyond the last part continues at the
    first.
    """
    parts = bounds(numel, size)
    steps: list[Step] = []
    have = 1
    while have < size:
        count = min(have, size - have)
        steps.append(
            Step(
                to=(rank - have) % size,
                out=_run(parts, rank, count),
                source=(rank + have) % size,
                into=_run(parts, (rank + have) % size, count),
            )
        )
        have += count
    return steps


def halving_all_reduce(numel: int, size: int, rank: int) -> list[Step]:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner): as many bytes as the ring in
    2 log2 p steps. Ranks beyond a power of two first pass their elements to a neighbour, and get the sums back at the end."""
    fold = _Fold(size, rank)
    if fold.virtual is None:
        return [Step(to=fold.partner, out=((0, numel),)), Step(source=fold.partner, into=((0, numel),))]
    cuts = [start for start, _ in bounds(numel, fold.size)] + [numel]
    scatter = _halving(cuts, fold)
    gather = [Step(to=step.to, out=step.into, source=step.source, into=step.out) for step in reversed(scatter)]
    return fold.before(numel) + scatter + gather + fold.after(((0, numel),))


def halving_reduce_scatter(numel: int, size: int, rank: int) -> list[Step]:
    """Reduce-scatter in about log2 p steps for any p; part ``rank`` is finally summed on ``rank``.

    A rank that represents its neighbour, too, sums both parts (which are adjacent) and sends the neighbour its own.
    """
    fold = _Fold(size, rank)
    parts = bounds(numel, size)
    if fold.virtual is None:
        return [Step(to=fold.partner, out=((0, numel),)), Step(source=fold.partner, into=(parts[rank],))]
    cuts = [parts[fold.first_part(virtual)][0] for virtual in range(fold.size)] + [numel]
    return fold.before(numel) + _halving(cuts, fold) + fold.after((parts[rank - 1],))


def doubling_all_reduce(numel: int, size: int, rank: int) -> list[Step]:
    """Partners exchange and add everything they have, in log2 p steps: the fewest steps, but log2 p times the bytes. For small
    payloads."""
    fold = _Fold(size, rank)
    everything = ((0, numel),)
    if fold.virtual is None:
        return [Step(to=fold.partner, out=everything), Step(source=fold.partner, into=everything)]
    steps: list[Step] = []
    distance = 1
    while distance < fold.size:
        partner = fold.real(fold.virtual ^ distance)
        steps.append(Step(to=partner, out=everything, source=partner, into=everything, add=True))
        distance *= 2
    return fold.before(numel) + steps + fold.after(everything)


def binomial_tree(size: int, rank: int, root: int) -> tuple[int | None, list[int]]:
    """The rank's parent (``None`` at the root) and its children, those with the largest subtree first."""
    virtual = (rank - root) % size
    reach = virtual & -virtual if virtual else 1 << (size - 1).bit_length()
    parent = (virtual - reach + root) % size if virtual else None
    children: list[int] = []
    while reach > 1:
        reach //= 2
        if virtual + reach < size:
            children.append((virtual + reach + root) % size)
    return parent, children


def dissemination(size: int, rank: int) -> list[tuple[int, int]]:
    """The ranks to notify and to wait for in each of the ceil(log2 p) rounds of a barrier."""
    distances = [1 << step for step in range((size - 1).bit_length())]
    return [((rank + distance) % size, (rank - distance) % size) for distance in distances]


class _Fold:
    """The largest power of two in ``size`` ranks. Of the first 2 * extra ranks the odd ones represent the even ones."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = 1 << (size.bit_length() - 1)
        self.extra = size - self.size
        self.folded = rank < 2 * self.extra
        self.partner = rank ^ 1
        self.virtual = None if self.folded and rank % 2 == 0 else rank // 2 if self.folded else rank - self.extra
        """The rank among those that take part, or ``None``."""

    def real(self, virtual: int) -> int:
        return 2 * virtual + 1 if virtual < self.extra else virtual + self.extra

    def first_part(self, virtual: int) -> int:
        """The first of the parts that this rank sums: two, if it represents a neighbour."""
        return 2 * virtual if virtual < self.extra else virtual + self.extra

    def before(self, numel: int) -> list[Step]:
        return [Step(source=self.partner, into=((0, numel),), add=True)] if self.folded else []

    def after(self, out: tuple[Span, ...]) -> list[Step]:
        return [Step(to=self.partner, out=out)] if self.folded else []


def _halving(cuts: Sequence[int], fold: _Fold) -> list[Step]:
    """Virtual rank v ends with the sum of elements ``cuts[v]`` to ``cuts[v + 1]``."""
    assert fold.virtual is not None
    steps: list[Step] = []
    low, high = 0, fold.size
    while high - low > 1:
        half = (high - low) // 2
        middle = low + half
        lower, upper = (cuts[low], cuts[middle]), (cuts[middle], cuts[high])
        keeps_lower = fold.virtual < middle
        partner = fold.real(fold.virtual + half if keeps_lower else fold.virtual - half)
        keep, give = (lower, upper) if keeps_lower else (upper, lower)
        steps.append(Step(to=partner, out=(give,), source=partner, into=(keep,), add=True))
        low, high = (low, middle) if keeps_lower else (middle, high)
    return steps


def _run(parts: Sequence[Span], first: int, count: int) -> tuple[Span, ...]:
    """``count`` parts from ``first`` on, continuing at part 0 after the last: one span or two."""
    size = len(parts)
    if first + count <= size:
        return ((parts[first][0], parts[first + count - 1][1]),)
    return ((parts[first][0], parts[-1][1]), (parts[0][0], parts[first + count - size - 1][1]))
