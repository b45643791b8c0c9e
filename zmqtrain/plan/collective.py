"""Messages and bytes of this project's collectives, as `zmqtrain.collectives` sends them: those of its busiest rank."""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.collectives.choose import choose_all_gather, choose_all_reduce


@dataclass(frozen=True, slots=True)
class Sent:
    """What the rank that sends most sends."""

    messages: int
    numel: int


def all_gather(numel: int, size: int, itemsize: int, *, ring: bool = False) -> Sent:
    """Of ``numel`` elements in all. ``ring``: never another algorithm, else the one that `zmqtrain.collectives.choose` chooses.

    The busiest rank passes on all parts but the smallest.
    """
    if size == 1 or numel == 0:
        return Sent(0, 0)
    most = numel - numel // size
    if ring or choose_all_gather(numel * itemsize, size) == "ring":
        return Sent(size - 1, most)
    return Sent((size - 1).bit_length(), most)


def all_reduce(numel: int, size: int, itemsize: int, *, ring: bool = False) -> Sent:
    """Of ``numel`` elements. Where ranks are no power of two, halving and doubling fold the others in: two messages more."""
    if size == 1 or numel == 0:
        return Sent(0, 0)
    algorithm = "ring" if ring else choose_all_reduce(numel * itemsize, size)
    smallest, larger = divmod(numel, size)
    if algorithm == "ring":  # each rank leaves out two parts that lie side by side
        return Sent(2 * (size - 1), 2 * numel - 2 * smallest - (larger == size - 1))
    steps = size.bit_length() - 1
    core = 1 << steps
    fold = int(size != core)  # a rank that stands in for another sends it the sums; it receives its elements while it waits
    if algorithm == "doubling":
        return Sent(steps + fold, (steps + fold) * numel)
    return Sent(2 * steps + fold, 2 * (numel - numel // core) + fold * numel)
