"""Schedules are followed message by message, without a network, and their rules are checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.collectives.group import bounds
from zmqtrain.collectives.schedule import (
    Schedule,
    binomial_tree,
    bruck_all_gather,
    dissemination,
    doubling_all_reduce,
    halving_all_reduce,
    halving_reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)

Make = Callable[[int, int, int], Schedule]
Element = frozenset[int]

sizes = st.integers(1, 17)
lengths = st.integers(0, 40)


class Walk:
    """All ranks' schedules, walked through in any order that the messages allow.

    An element's content is the set of ranks that were added up in it; a message remembers all messages that it depends on.
    """

    def __init__(self, make: Make, numel: int, size: int, start: Callable[[int, int], Element]) -> None:
        self.size = size
        self.schedules = [make(numel, size, rank) for rank in range(size)]
        self.memory = [[start(rank, element) for element in range(numel)] for rank in range(size)]
        self.sent_elements = [0] * size
        self.messages = 0
        self._links: dict[tuple[int, int], deque[tuple[int, list[Element], set[int]]]] = {}
        self._known: list[set[int]] = [set() for _ in range(size)]  # messages that each rank's state follows from
        self._lent: list[dict[int, set[int]]] = [{} for _ in range(size)]  # element -> messages that were sent from its memory

    def run(self) -> None:
        position, posted = [0] * self.size, [-1] * self.size
        while any(position[rank] < len(self.schedules[rank]) for rank in range(self.size)):
            moved = False
            for rank in range(self.size):
                if position[rank] == len(self.schedules[rank]):
                    continue
                step = self.schedules[rank][position[rank]]
                if posted[rank] < position[rank]:
                    posted[rank] = position[rank]
                    moved = True
                    if step.to is not None:
                        self._send(rank, step.to, [e for span in step.out for e in range(*span)], copied=step.copied)
                into = [e for span in step.into for e in range(*span)]
                if step.source is None or not into:
                    position[rank] += 1
                    moved = True
                elif self._links.get((step.source, rank)):
                    self._receive(rank, step.source, into, add=step.add)
                    position[rank] += 1
                    moved = True
            assert moved, "all ranks wait for each other"
        assert not any(self._links.values()), "a message that nobody receives"

    def _send(self, rank: int, to: int, elements: Sequence[int], *, copied: bool) -> None:
        if not elements:
            return
        assert to != rank
        self.messages += 1
        self.sent_elements[rank] += len(elements)
        content = [self.memory[rank][element] for element in elements]
        self._links.setdefault((rank, to), deque()).append((self.messages, content, set(self._known[rank])))
        if not copied:
            for element in elements:
                self._lent[rank].setdefault(element, set()).add(self.messages)

    def _receive(self, rank: int, source: int, elements: Sequence[int], *, add: bool) -> None:
        message, content, follows = self._links[source, rank].popleft()
        assert len(content) == len(elements), "the partners' spans differ"
        for element, value in zip(elements, content, strict=True):
            assert self._lent[rank].get(element, set()) <= follows, "memory is overwritten that may not have been sent yet"
            if add:
                assert not self.memory[rank][element] & value, "a contribution is added twice"
                value = self.memory[rank][element] | value
            self.memory[rank][element] = value
        self._known[rank] |= follows | {message}


def mine(rank: int, element: int) -> Element:
    return frozenset({rank})


@given(size=sizes, numel=lengths)
def test_bounds_cover_everything_evenly(size: int, numel: int) -> None:
    parts = bounds(numel, size)
    lengths = [stop - start for start, stop in parts]
    assert [parts[0][0], *(stop for _, stop in parts)] == [*(start for start, _ in parts), numel]
    assert sorted(lengths, reverse=True) == lengths
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("make", [ring_all_reduce, halving_all_reduce, doubling_all_reduce])
@given(size=sizes, numel=lengths)
def test_all_reduce_adds_each_rank_once_everywhere(make: Make, size: int, numel: int) -> None:
    walk = Walk(make, numel, size, mine)
    walk.run()
    assert walk.memory == [[frozenset(range(size))] * numel] * size


@pytest.mark.parametrize("make", [ring_reduce_scatter, halving_reduce_scatter])
@given(size=sizes, numel=lengths)
def test_reduce_scatter_sums_each_ranks_part_at_the_rank(make: Make, size: int, numel: int) -> None:
    walk = Walk(make, numel, size, mine)
    walk.run()
    for rank, (start, stop) in enumerate(bounds(numel, size)):
        assert walk.memory[rank][start:stop] == [frozenset(range(size))] * (stop - start)


@pytest.mark.parametrize("make", [ring_all_gather, bruck_all_gather])
@given(size=sizes, numel=lengths)
def test_all_gather_spreads_each_ranks_part(make: Make, size: int, numel: int) -> None:
    owner = [rank for rank, (start, stop) in enumerate(bounds(numel, size)) for _ in range(start, stop)]
    walk = Walk(make, numel, size, lambda rank, element: frozenset({rank} if owner[element] == rank else ()))
    walk.run()
    assert walk.memory == [[frozenset({rank}) for rank in owner]] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_the_ring_sends_the_least_there_can_be(size: int) -> None:
    walk = Walk(ring_all_reduce, 24 * 7, size, mine)
    walk.run()
    assert walk.sent_elements == [2 * 24 * 7 * (size - 1) // size] * size


@pytest.mark.parametrize(("size", "steps"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_bruck_takes_logarithmically_many_steps(size: int, steps: int) -> None:
    assert [len(bruck_all_gather(100, size, rank)) for rank in range(size)] == [steps] * size


@given(size=sizes, data=st.data())
def test_a_binomial_tree_reaches_every_rank_once(size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    trees = [binomial_tree(size, rank, root) for rank in range(size)]
    assert trees[root][0] is None
    assert sorted(child for _, children in trees for child in children) == sorted(set(range(size)) - {root})
    for rank, (_, children) in enumerate(trees):
        assert all(trees[child][0] == rank for child in children)
    assert len(trees[root][1]) == (size - 1).bit_length()


@given(size=sizes)
def test_dissemination_lets_everybody_hear_of_everybody(size: int) -> None:
    heard = [{rank} for rank in range(size)]
    rounds = [dissemination(size, rank) for rank in range(size)]
    for step in range((size - 1).bit_length()):
        before = [set(ranks) for ranks in heard]
        for rank in range(size):
            to, source = rounds[rank][step]
            assert rounds[to][step][1] == rank
            heard[rank] |= before[source]
    assert heard == [set(range(size))] * size
