"""Sums of tensors where they lie, between processes of one host that can read each other's adopted pages.

Each process sums its slice of all tensors into its own tensor, and when all have done so, copies the other slices from the tensors
of those who summed them. So a tensor crosses memory once to be summed and once to be copied, and processes only ever write to their
own. Sums are added in the order of the ranks, with the same bits as those through the window.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zmqtrain.arena.arena import PROCESS
from zmqtrain.arena.region import PAGE
from zmqtrain.collectives.group import bounds
from zmqtrain.host.adopted import Adopted, Adoptions, Others
from zmqtrain.host.sums import Combine, sum_into
from zmqtrain.host.team import Team

_FORMAT = struct.Struct("<QQQQ")
#: Bytes in which a process says where its tensor lies.
NBYTES = _FORMAT.size
#: After so many operations in which only some processes' tensors were adopted, a process offers no more: each costs a wait.
_MOST_MIXED = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where the pages of a process's tensor are. Number 0: they are not to be read where they lie."""

    number: int = 0
    file: int = 0
    before: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, adopted: Adopted | None) -> Place:
        return cls() if adopted is None else cls(adopted.number, adopted.file, adopted.before, adopted.nbytes)

    @classmethod
    def unpack(cls, packed: bytes) -> Place:
        return cls(*_FORMAT.unpack(packed))

    def pack(self) -> bytes:
        """``NBYTES`` bytes."""
        return _FORMAT.pack(self.number, self.file, self.before, self.nbytes)


class InPlace:
    """One process's part of such sums."""

    def __init__(self, team: Team, adoptions: Adoptions) -> None:
        self._team, self._adoptions = team, adoptions
        self._others = [Others(partial(team.words_of(member).get, PROCESS)) for member in range(team.size)]
        self._mixed = 0

    def offer(self, flat: Tensor) -> Place:
        """Where this process's tensor lies, if the others may read it there."""
        if self._mixed > _MOST_MIXED or flat.data_ptr() % flat.element_size():
            return Place()
        return Place.of(self._adoptions.use(flat))

    def mixed(self) -> None:
        """Only some processes have offered theirs."""
        self._mixed += 1

    def refuse(self) -> None:
        """Offer nothing any more."""
        self._mixed = _MOST_MIXED + 1

    def is_new(self, places: Sequence[Place]) -> bool:
        """Whether a tensor's pages must be opened first: all processes answer alike, since all see the same places each time."""
        return any(not others.knows(place.number) for others, place in self._of_others(places))

    def open(self, places: Sequence[Place]) -> bool:
        """Open all pages that are new. Returns False if this process cannot."""
        return all(
            others.knows(place.number) or others.open(place.number, place.file, place.nbytes)
            for others, place in self._of_others(places)
        )

    def sum(
        self,
        flat: Tensor,
        edges: Sequence[tuple[Tensor, Tensor]],
        places: Sequence[Place],
        combine: Combine,
        wait: Callable[[], None],
    ) -> None:
        """``flat`` becomes the combination of all members' tensors.

        ``edges``: each member's first and last page of elements (see `edges_of`). ``wait``: returns when all have called it.
        """
        rank, size, itemsize = self._team.rank, self._team.size, flat.element_size()
        first = -(-max(place.before for place in places) // itemsize)
        last = min(place.before + place.nbytes for place in places) // itemsize
        slices = [(first + start, first + stop) for start, stop in bounds(last - first, size)]

        def part(member: int, start: int, stop: int) -> Tensor:
            if member == rank:
                return flat[start:stop]
            place = places[member]
            memory = self._others[member].memory(place.number)
            return memory[start * itemsize - place.before : stop * itemsize - place.before].view(flat.dtype)

        start, stop = slices[rank]
        if start < stop:
            sum_into([flat[start:stop]], [part(member, start, stop) for member in range(size)], combine=combine)
        wait()
        for step in range(1, size):  # each begins with another one: they do not all read the same memory at once
            member = (rank + step) % size
            start, stop = slices[member]
            if start < stop:
                flat[start:stop].copy_(part(member, start, stop))
        for target, ends in (
            (flat[:first], [head[:first] for head, _ in edges]),
            (flat[last:], [tail[len(tail) - (len(flat) - last) :] for _, tail in edges]),
        ):
            if len(target):
                sum_into([target], ends, combine=combine)

    def _of_others(self, places: Sequence[Place]) -> list[tuple[Others, Place]]:
        return [(self._others[member], place) for member, place in enumerate(places) if member != self._team.rank]


def edges_of(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last elements, a page of each: pages of other members' tensors may begin elsewhere."""
    length = min(-(-PAGE // flat.element_size()), flat.numel())
    return flat[:length], flat[flat.numel() - length :]
