"""Sums of tensors where they lie, between processes of one host that can read each other's adopted pages.

Each process sums its slice of all tensors into its own tensor, and when all have done so, copies the other slices from the tensors
of those who summed them. So a tensor crosses memory once to be summed and once to be copied, and processes only ever write to their
own. Sums are added in the order of the ranks, with the same bits as those through the window.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zmqtrain.arena.arena import PROCESS
from zmqtrain.arena.region import PAGE
from zmqtrain.collectives.group import bounds
from zmqtrain.host.adopted import Adopted, Adoptions, pages_of
from zmqtrain.host.sums import Combine, sum_into
from zmqtrain.host.team import Team

_FORMAT = struct.Struct("<QQQQ")
#: Bytes in which a process says where its tensor lies.
NBYTES = _FORMAT.size
#: After this many operations in which only some processes' tensors were adopted, a process offers no more: each costs a wait.
_MOST_MIXED = 4
#: Tensors that stay mapped, the last ones used: as many as whose uses are counted.
_MOST_OPENED = 256


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
        """Encode the place of adopted pages. Returns ``NBYTES`` bytes."""
        return _FORMAT.pack(self.number, self.file, self.before, self.nbytes)


class InPlace:
    """One process's part of such sums."""

    def __init__(self, team: Team, adoptions: Adoptions) -> None:
        self._team, self._adoptions = team, adoptions
        #: The pages of all members' tensors that came together, by their numbers; None for one's own. All members have the same
        #: numbers in it, whatever tensors each one takes again and again.
        self._opened: OrderedDict[tuple[int, ...], list[Tensor | None]] = OrderedDict()
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
        self._opened.clear()

    def is_new(self, places: Sequence[Place]) -> bool:
        """Whether pages must be opened first: all members answer alike."""
        return _numbers(places) not in self._opened

    def open(self, places: Sequence[Place]) -> bool:
        """Open the pages of tensors that have not come together before. Returns False if this process cannot."""
        opened: list[Tensor | None] = []
        for member, place in enumerate(places):
            own = member == self._team.rank
            pages = None if own else pages_of(self._team.words_of(member).get(PROCESS), place.file, place.nbytes)
            if pages is None and not own:
                return False
            opened.append(pages)
        self._opened[_numbers(places)] = opened
        while len(self._opened) > _MOST_OPENED:
            self._opened.popitem(last=False)
        return True

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

        opened = self._opened[_numbers(places)]
        self._opened.move_to_end(_numbers(places))

        def part(member: int, start: int, stop: int) -> Tensor:
            pages, before = opened[member], places[member].before
            if pages is None:
                return flat[start:stop]
            return pages[start * itemsize - before : stop * itemsize - before].view(flat.dtype)

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


def _numbers(places: Sequence[Place]) -> tuple[int, ...]:
    return tuple(place.number for place in places)


def edges_of(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last elements, a page of each: pages of other members' tensors may begin elsewhere."""
    length = min(-(-PAGE // flat.element_size()), flat.numel())
    return flat[:length], flat[flat.numel() - length :]
