"""Messages and bytes of the busiest rank in this project's collectives, as `zmqtrain.collectives` and `zmqtrain.parallel` send
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from zmqtrain.collectives.choose import choose_all_reduce
from zmqtrain.collectives.operations import sent_by_all_reduce

#: All-reduces of up to this many ranks are followed step by step; of larger ones, bytes are exact to one element per rank.
FOLLOWED = 16


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers of messages and elements that the busiest rank sends."""

    messages: int
    numel: int


def ring(numel: int, units: int, size: int) -> Sent:
    """An all-gather, or a reduce-scatter, of ``numel`` elements in ``units`` that the ranks hold as evenly as possible.

    A rank passes on all parts except one: the busiest, all except the smallest. Empty parts cost no message.
    """
    if size == 1 or numel == 0:
        return Sent(0, 0)
    smallest = units // size
    messages = size - 1 if smallest else min(units, size - 1)
    return Sent(messages, numel - smallest * numel // units)


def idle(numel: int, size: int, itemsize: int) -> float:
    """The elements that the network could have carried while an all-reduce, that nothing else is sent beside, waits for itself.

    By halving, the first pieces of a step are not those that the rank has received first, and each step waits for the one before
    it: as simulated (`python -m benchmarks predicted`), a quarter of all elements, for 4 and 8 ranks alike. In a ring pieces
    stream.
    """
    halving = size > 2 and choose_all_reduce(numel * itemsize, size) == "halving"
    return numel / 4 if halving else 0.0


@lru_cache(maxsize=65536)
def all_reduce(numel: int, size: int, itemsize: int) -> Sent:
    """An all-reduce of ``numel`` elements. If the ranks are not a power of two, halving and doubling takes two more messages."""
    if size == 1 or numel == 0:
        return Sent(0, 0)
    if size <= FOLLOWED:
        every = [sent_by_all_reduce(numel, itemsize, size, rank) for rank in range(size)]
        return Sent(max(messages for messages, _ in every), max(nbytes for _, nbytes in every) // itemsize)
    algorithm = choose_all_reduce(numel * itemsize, size)
    smallest, larger = divmod(numel, size)
    if algorithm == "ring":  # each rank leaves out two adjacent parts
        return Sent(2 * (size - 1), 2 * numel - 2 * smallest - (larger == size - 1))
    steps = size.bit_length() - 1
    core = 1 << steps
    fold = int(size != core)  # a rank that represents another sends it the sums; it receives its elements while it waits
    if algorithm == "doubling":
        return Sent(steps + fold, (steps + fold) * numel)
    return Sent(2 * steps + fold, 2 * (numel - numel // core) + fold * numel)
