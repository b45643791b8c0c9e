"""Collectives between processes of one host on tensors anywhere in memory: through a window of shared memory, chunk by chunk.

Each process has a window that all others read. What it offers goes through the window in chunks that stay in the processor's cache,
so a tensor crosses memory once on each side, and no process needs shared memory of a tensor's size. Sums of tensors that come again
and again are made where the tensors lie (`zmqtrain.host.in_place`).

Windows have two halves, used in turn. A process writes to a half again only after all others have arrived at the chunk in between,
and each arrives there only after it has read the half: so one wait per chunk is enough, and two if sums are written as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from zmqtrain.collectives.group import bounds
from zmqtrain.host.adopted import ADOPTIONS, LEAST_BYTES, Adoptions
from zmqtrain.host.in_place import NBYTES as PLACE_BYTES
from zmqtrain.host.in_place import InPlace, Place, edges_of
from zmqtrain.host.sums import Combine, sum_into
from zmqtrain.host.team import Team, Word

#: Bytes of a half, for each process: larger ones mean fewer waits, each of which costs more with more processes; smaller ones stay
#: in smaller caches. (Offering chunks ahead of the others, to avoid waiting, was slower: more chunks then share the cache.)
CHUNK_BYTES = 1 << 20
#: Up to here in all, each process sums whole tensors by itself: one wait less costs more than the arithmetic does.
WHOLE_BYTES = 512 * 1024
_ALIGNMENT = 64
#: For each half: what a member says of the operation that begins there.
_HEADER_BYTES = 128
#: That, and where its tensor lies.
_SAYS_BYTES = _HEADER_BYTES + 64

#: ``at(source, part)``: what a process offers of a part in this round, as bytes.
At: TypeAlias = Callable[[int, int], Tensor]


class Window:
    """One process's window, and its view of the others'. All members call the same methods in the same order, in one thread."""

    def __init__(self, team: Team, *, chunk_bytes: int | None = None, adoptions: Adoptions = ADOPTIONS) -> None:
        """Blocks until all members of ``team`` have made theirs. All pass the same ``chunk_bytes``, or none. ``adoptions``: of this
        process."""
        self.team = team
        self._chunk = chunk_bytes = chunk_bytes or CHUNK_BYTES * team.size
        block = team.arena.allocate(2 * (chunk_bytes + _SAYS_BYTES), "a window")
        places = team.join([block.place])
        memory = [torch.frombuffer(team.arena.memory(each[0]), dtype=torch.uint8) for each in places]
        self._halves = [[each[:chunk_bytes], each[chunk_bytes : 2 * chunk_bytes]] for each in memory]
        headers = [team.arena.memory(each[0])[2 * chunk_bytes :] for each in places]
        self._headers = [[each[:_SAYS_BYTES], each[_SAYS_BYTES:]] for each in headers]
        self._in_place = InPlace(team, adoptions)
        self._header: bytes | None = None
        self._check: Callable[[list[bytes]], None] | None = None
        self._count = 1  # operations; joining was the first
        self._half = 0

    @property
    def rank(self) -> int:
        """This process's rank in the team."""
        return self.team.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.team.size

    def begin(self, header: bytes, check: Callable[[list[bytes]], None]) -> None:
        """What the next operation is: ``check`` gets the headers of all members in the order of their ranks, as soon as all have
        come, and raises if they do not fit together. Headers have one length, at most 128 bytes."""
        assert len(header) <= _HEADER_BYTES
        self._header, self._check = header, check

    def offer(self, parts: Sequence[Tensor | None], longest: int, take: Callable[[int, int, At], None], what: str) -> None:
        """Every process offers its parts (flat bytes; None: nothing), and reads what it needs of the others' as they pass.

        All pass the same number of parts, and the length of the ``longest`` of all. ``take(start, stop, at)`` is called for each
        stretch of the parts: ``at(source, part)`` holds bytes ``start`` up to ``stop`` of what ``source`` offers (beyond the end of
        a part they are undefined). ``what`` is for errors.
        """
        room = self._chunk // len(parts) // _ALIGNMENT * _ALIGNMENT
        assert room, "too many parts for a window"
        for start in range(0, max(longest, 1), room):
            stop, half = min(start + room, longest), self._half
            own = self._halves[self.rank][half]
            for number, part in enumerate(parts):
                if part is not None and start < part.numel():
                    piece = part[start:stop]
                    own[number * room : number * room + piece.numel()].copy_(piece)
            self._arrive(what)
            length = stop - start

            def at(source: int, part: int, half: int = half, length: int = length) -> Tensor:
                return self._halves[source][half][part * room : part * room + length]

            take(start, stop, at)

    def all_reduce(self, flat: Tensor, combine: Combine, what: str, *, root: int | None = None) -> None:
        """``flat`` becomes the combination of all members' tensors in the order of their ranks; only on the member ``root``, if it
        is given, and the others' stay unchanged."""
        nbytes = flat.numel() * flat.element_size()
        if nbytes * self.size <= min(WHOLE_BYTES, self._chunk):
            self._reduce_whole(flat, combine, what, receives=root in (None, self.rank))
            return
        place = Place() if root is not None else self._in_place.offer(flat)
        if place.number:
            half = self._half
            views = [self._edges(halves[half], flat) for halves in self._halves]
            for edge, content in zip(views[self.rank], edges_of(flat), strict=True):
                edge.copy_(content)
            places = self._arrive(what, place)
            if self._all_can_read(places, what):
                self._in_place.sum(flat, views, places, combine, lambda: self._wait(Word.DONE, what))
                self._wait(Word.TAKEN, what)
                return
            told = True
        else:
            told = root is not None or nbytes < LEAST_BYTES
        self._reduce_through(flat, combine, what, root, told=told)

    def _reduce_whole(self, flat: Tensor, combine: Combine, what: str, *, receives: bool) -> None:
        """Reduce the tensor in one chunk, of which each process reads all parts."""
        half = self._half
        windows = [halves[half][: flat.numel() * flat.element_size()].view(flat.dtype) for halves in self._halves]
        windows[self.rank].copy_(flat)
        self._arrive(what)
        if receives:
            sum_into([flat], windows, combine=combine)

    def _reduce_through(self, flat: Tensor, combine: Combine, what: str, root: int | None, *, told: bool) -> None:
        """Chunk by chunk. ``told``: this member has said where its tensor lies, or nobody asks."""
        room, mine = self._chunk // flat.element_size(), self.rank
        others = [member for member in range(self.size) if member != mine]
        receives = root is None or root == mine
        for start in range(0, max(flat.numel(), 1), room):
            part = flat[start : start + room]
            own = _slices(part, self.size)
            while True:
                half = self._half
                windows = [_slices(halves[half].view(flat.dtype)[: part.numel()], self.size) for halves in self._halves]
                for member in others:  # no other member needs one's own slice
                    windows[mine][member].copy_(own[member])
                if told:
                    self._arrive(what)
                    break
                told = True
                if not any(place.number for place in self._arrive(what, Place())):
                    break
                self._in_place.mixed()  # some have told where their tensors lie, instead of writing a chunk: all begin anew
            sources = [own[mine] if member == mine else windows[member][mine] for member in range(self.size)]
            result = windows[mine][mine]
            sum_into([own[mine], result] if receives else [result], sources, combine=combine)
            self._wait(Word.DONE, what)
            if receives:
                for member in others:
                    own[member].copy_(windows[member][member])

    def _all_can_read(self, places: Sequence[Place], what: str) -> bool:
        """Whether all members' tensors can be read where they lie, by all."""
        if not all(place.number for place in places):
            self._in_place.mixed()
            return False
        if self._in_place.is_new(places):
            mine = places[self.rank] if self._in_place.open(places) else Place()
            if not all(place.number for place in self._arrive(what, mine)):
                self._in_place.refuse()
                return False
        return True

    def _edges(self, half: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Where a member's edges are in its window."""
        head, tail = edges_of(flat)
        content = half.view(flat.dtype)
        return content[: len(head)], content[len(head) : len(head) + len(tail)]

    def _wait(self, word: Word, what: str) -> None:
        self.team.set(word, self._count)
        self.team.wait(word, self._count, what)

    def reduce_scatter(self, parts: Sequence[Tensor], output: Tensor, combine: Combine, what: str, *, longest: int) -> None:
        """``output`` becomes the combination of the members' ``parts[rank]``. All parts are flat and of one dtype; the largest has
        ``longest`` bytes."""
        itemsize = output.element_size()

        def take(start: int, stop: int, at: At) -> None:
            piece = output[start // itemsize : stop // itemsize]
            sources = [at(source, self.rank).view(output.dtype)[: piece.numel()] for source in range(self.size)]
            sum_into([piece], sources, combine=combine)

        self.offer([as_bytes(part) for part in parts], longest, take, what)

    def barrier(self, what: str) -> None:
        """Returns once all members have called it."""
        self._arrive(what)

    def _arrive(self, what: str, place: Place | None = None) -> list[Place]:
        """Wait for all members. Returns where their tensors lie, if all of them pass a ``place`` here."""
        half, header, check = self._half, self._header, self._check
        self._header = self._check = None
        own = self._headers[self.rank][half]
        if header is not None:
            own[: len(header)] = header
        if place is not None:
            own[_HEADER_BYTES : _HEADER_BYTES + PLACE_BYTES] = place.pack()
        self._half ^= 1
        self._count += 1
        self._wait(Word.ARRIVED, what)
        if header is not None and check is not None:
            # All members have the same headers: if they do not fit, all end the operation here, and can go on with another one.
            check([bytes(each[half][: len(header)]) for each in self._headers])
        if place is None:
            return []
        return [Place.unpack(bytes(each[half][_HEADER_BYTES : _HEADER_BYTES + PLACE_BYTES])) for each in self._headers]


def _slices(flat: Tensor, count: int) -> list[Tensor]:
    return [flat[start:stop] for start, stop in bounds(flat.numel(), count)]


def as_bytes(flat: Tensor) -> Tensor:
    """The memory of a flat tensor as bytes."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
