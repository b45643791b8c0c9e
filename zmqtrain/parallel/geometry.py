"""Which rows a strip of an image needs from other processes: the algebra of halos, along one dimension.

An image is divided into strips, one for each member of a communicator; all members know all ranges (a `Division`). A layer turns
``length`` rows into ``outputs`` rows, and its `Reach` says which input rows a range of output rows needs. From a reach, the
division of the input and that of the output follows everything else (`Strip`): what each member sends and receives, which of its
output rows it can compute from its own rows (the *interior*), and which only with rows of others (the *rims*).

* Needed rows may lie at any member, not only at the next: a strip that is shorter than the halo, or empty, asks further away, in
  one message for each member asked. A strip may also hold rows that it does not need itself (a negative halo).
* Padding is never sent: it exists at the image's edges only, and who computes there makes it.
* Backward is the exact adjoint: each member computes what its own output rows add to the gradients of the rows that it needed,
  keeps the part of its own rows, and sends each other part to where the row came from, which adds it. So as many rows travel
  backward as forward, between the same members, the other way. (The paper sends rows of dY instead, so that each member computes
  the whole gradient of its rows. Then the rims' products are computed at both sides of a cut, the halo of dY has an algebra of
  its own, and a maximum or a mean also needs what forward knew about the rows of others. With stride 1 and as many input as
  output channels the bytes are the same.)
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import UsageError

#: Rows from the first to, but without, the second.
Range: TypeAlias = tuple[int, int]
#: The rows of each member, in order; together all rows of the image, once each. Ranges may be empty.
Division: TypeAlias = tuple[Range, ...]


class Reach(Protocol):
    """Which input rows the output rows of an operation need."""

    @property
    def length(self) -> int:
        """Rows of the input."""
        ...

    @property
    def outputs(self) -> int:
        """Rows of the output."""
        ...

    def needs(self, outputs: Range) -> Range:
        """The input rows that a range of output rows needs, within the image. Both ends grow with the range's ends."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """A kernel that slides over the rows: convolution and pooling."""

    length: int
    kernel: int
    stride: int = 1
    before: int = 0
    """Rows of padding before the first."""
    after: int = 0
    dilation: int = 1
    ceil: bool = False
    """Whether a last window may stand out over the padding's end, as pooling has it."""

    @property
    def extent(self) -> int:
        """Rows from a window's first to its last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def outputs(self) -> int:
        room = self.length + self.before + self.after - self.extent
        if not self.ceil:
            return max(0, room // self.stride + 1)
        count = max(0, -(-room // self.stride) + 1)
        # A window that would begin in the padding after the image, or beyond it, does not count.
        return count - 1 if (count - 1) * self.stride >= self.length + self.before else count

    def windows(self, outputs: Range) -> Range:
        """The rows that the windows cover, padding included: negative ones, and some beyond the image."""
        start, stop = outputs
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.extent

    def needs(self, outputs: Range) -> Range:
        first, last = self.windows(outputs)
        return _within(self.length, first, last if outputs[0] < outputs[1] else first)

    def padding(self, outputs: Range) -> tuple[int, int]:
        """Rows of padding before and after the needed rows, so that the windows fit exactly."""
        first, last = self.windows(outputs)
        return max(0, min(last, 0) - first), max(0, last - max(first, self.length))


@dataclass(frozen=True, slots=True)
class Transposed:
    """A kernel that is spread over the output for each input row: transposed convolution."""

    length: int
    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Rows from the first to the last that an input row reaches."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def outputs(self) -> int:
        return max(0, (self.length - 1) * self.stride - 2 * self.padding + self.extent + self.output_padding)

    def needs(self, outputs: Range) -> Range:
        start, stop = outputs
        first = -((self.extent - 1 - start - self.padding) // self.stride)
        last = (stop - 1 + self.padding) // self.stride + 1
        return _within(self.length, first, last if start < stop else first)

    def spread(self, inputs: Range) -> Range:
        """The output rows that a range of input rows reaches, some of them cut off as padding."""
        start, stop = inputs
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.extent


@dataclass(frozen=True, slots=True)
class Table:
    """An explicit range of input rows for every output row: adaptive pooling, interpolation."""

    length: int
    firsts: tuple[int, ...]
    """The first row that each output row, or any after it, needs."""
    lasts: tuple[int, ...]
    """One beyond the last row that each output row, or any before it, needs."""

    @classmethod
    def of(cls, length: int, ranges: Sequence[Range]) -> Table:
        """The table of these ranges of input rows, one for each output row."""
        firsts, lasts = [first for first, _ in ranges], [last for _, last in ranges]
        for row in range(len(ranges) - 1, 0, -1):
            firsts[row - 1] = min(firsts[row - 1], firsts[row])
        for row in range(1, len(ranges)):
            lasts[row] = max(lasts[row], lasts[row - 1])
        return cls(length, tuple(firsts), tuple(lasts))

    @property
    def outputs(self) -> int:
        return len(self.firsts)

    def needs(self, outputs: Range) -> Range:
        start, stop = outputs
        if start >= stop:
            return 0, 0
        return _within(self.length, self.firsts[start], self.lasts[stop - 1])


def adaptive(length: int, outputs: int) -> Table:
    """Adaptive pooling: output row j is made of rows floor(j n / m) to ceil((j + 1) n / m)."""
    return Table.of(length, [adaptive_range(length, outputs, row) for row in range(outputs)])


def adaptive_range(length: int, outputs: int, row: int) -> Range:
    """The input rows of one output row of adaptive pooling."""
    return row * length // outputs, -(-(row + 1) * length // outputs)


def even(length: int, members: int) -> Division:
    """Strips that differ by at most one row; the first are the larger."""
    return bounds(length, members)


def checked(division: Division) -> Division:
    """The division, if it is one. Raises `UsageError`."""
    expected = 0
    for start, stop in division:
        if start != expected or stop < start:
            raise UsageError(f"{division} is no division of an image: each strip must begin where the one before it ends")
        expected = stop
    if not division:
        raise UsageError("a division needs at least one strip")
    return division


def follow(reach: Reach, division: Division) -> Division:
    """The division of the output that lies best over a division of the input: balanced as the input is, and few rows cross.

    A cut of the input at row u may become a cut of the output at any row c; then the rows from the first that output row c needs
    to u travel down, and those from u to the last that row c - 1 needs travel up. Where windows overlap (s <= k) these are k - s
    rows in all for every c whose windows' overlap contains u, and more for any other. The c in proportion, u m / n, has u in its
    overlap, but is no whole number: of the two next to it the one is taken for which fewer rows cross, then the nearer one, then
    the one nearer to an even split. Further away a row or two might be saved at the image's edges, where windows are cut off, but
    a strip of more rows costs every process of the grid the time of its rows. Strips that were made uneven on purpose (for hosts
    of different speed) stay so.
    """
    cuts = [0]
    for member, (_, cut) in enumerate(division[:-1], start=1):
        cuts.append(max(cuts[-1], _follow(reach, cut, member / len(division))))
    cuts.append(reach.outputs)
    return tuple(itertools.pairwise(cuts))


def _follow(reach: Reach, cut: int, share: float) -> int:
    """Where to cut the output for a cut of the input that leaves this share of the members above it."""
    balanced, evenly = cut * reach.outputs / max(reach.length, 1), share * reach.outputs
    floor, remainder = divmod(cut * reach.outputs, max(reach.length, 1))
    candidates = (floor, floor + 1) if remainder else (floor,)
    return min(candidates, key=lambda row: (_crossing(reach, cut, row), abs(row - balanced), abs(row - evenly)))


def _crossing(reach: Reach, cut: int, row: int) -> int:
    """Input rows that cross ``cut`` if the output is cut at ``row``."""
    above = reach.needs((row - 1, row))[1] - cut if row > 0 else 0
    below = cut - reach.needs((row, row + 1))[0] if row < reach.outputs else 0
    return max(above, 0) + max(below, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that travel between this member and another."""

    member: int
    rows: Range


@dataclass(frozen=True, slots=True)
class Strip:
    """One member's part of a divided operation. Output rows are ``above``, ``interior`` and ``below``, in this order."""

    member: int
    own: Range
    """The input rows that it holds."""
    outputs: Range
    """The output rows that it computes."""
    needed: Range
    """The input rows that these need."""
    above: Range
    """Output rows that need rows of others before the own ones; all, where there is no interior."""
    interior: Range
    """Output rows that need own rows only."""
    below: Range
    """Output rows that need rows of others after the own ones."""
    receives: tuple[Part, ...]
    """The needed rows of others, in order of rows. In backward their gradients are sent back."""
    sends: tuple[Part, ...]
    """The own rows that others need, in order of members. In backward gradients of theirs come back, and are added."""

    @property
    def rims(self) -> tuple[Range, ...]:
        """The output rows that need rows of others."""
        return tuple(rows for rows in (self.above, self.below) if rows[0] < rows[1])


def strip(reach: Reach, division: Division, outputs: Division, member: int) -> Strip:
    """What ``member`` does in an operation whose input and output are divided like this."""
    own, mine = division[member], outputs[member]
    needed = reach.needs(mine)
    above, interior, below = _inside(reach, own, mine)
    sends = [
        Part(other, common)
        for other, others in enumerate(outputs)
        if other != member and length(common := overlap(own, reach.needs(others)))
    ]
    return Strip(member, own, mine, needed, above, interior, below, tuple(_received(division, needed, member)), tuple(sends))


def _inside(reach: Reach, own: Range, outputs: Range) -> tuple[Range, Range, Range]:
    """Output rows that need rows before the own ones, own ones only, and rows after them."""
    start, stop = outputs
    needed = reach.needs(outputs)
    if not length(needed) or (own[0] <= needed[0] and needed[1] <= own[1]):
        return (start, start), outputs, (stop, stop)
    rows = range(start, stop)
    first = start + bisect_left(rows, True, key=lambda row: reach.needs((row, row + 1))[0] >= own[0])
    last = start + bisect_left(rows, True, key=lambda row: reach.needs((row, row + 1))[1] > own[1])
    if first >= last:
        return outputs, (stop, stop), (stop, stop)
    return (start, first), (first, last), (last, stop)


def _received(division: Division, needed: Range, member: int) -> list[Part]:
    """The needed rows that others have."""
    parts = []
    for other in range(bisect_left(division, True, key=lambda rows: rows[1] > needed[0]), len(division)):
        if division[other][0] >= needed[1]:
            break
        if other != member and length(common := overlap(division[other], needed)):
            parts.append(Part(other, common))
    return parts


@dataclass(frozen=True, slots=True)
class Count:
    """What a member sends: messages, and bytes of tensors."""

    messages: int
    nbytes: int


def halo_traffic(
    reach: Reach, division: Division, outputs: Division, row_bytes: int, *, input_gradient: bool = True
) -> dict[Literal["forward", "backward"], tuple[Count, ...]]:
    """What each member sends in a pass: what the `Label` "halo" of a layer counts on the wire, message by message.

    Arguments:
        row_bytes: of one row of the input, over all samples and channels. Nothing at all is sent where it is 0.
        input_gradient: whether the layer's input needs a gradient; the first layer's does not, and sends nothing backward.
    """
    members = range(len(division))
    received = [_received(division, reach.needs(outputs[member]), member) if row_bytes else [] for member in members]
    forward = [(part.member, length(part.rows)) for parts in received for part in parts]
    backward = [(member, length(part.rows)) for member in members for part in received[member] if input_gradient]
    return {"forward": _counts(len(division), forward, row_bytes), "backward": _counts(len(division), backward, row_bytes)}


def grid_traffic(
    reaches: tuple[Reach, Reach],
    divisions: tuple[Division, Division],
    outputs: tuple[Division, Division],
    place_bytes: int,
    *,
    input_gradient: bool = True,
) -> dict[Literal["forward", "backward"], tuple[Count, ...]]:
    """The same of members that divide height and width: (row, column) of strips is member ``row x columns + column``.

    First rows travel within each column of strips, as `halo_traffic` counts them; then columns travel within each row of strips, as
    long as the rows that its output rows need: so the corners come with them.

    Arguments:
        place_bytes: of one place of the input, over all samples and channels.
    """
    tall, wide = divisions
    of_column = [
        halo_traffic(reaches[0], tall, outputs[0], place_bytes * length(own), input_gradient=input_gradient) for own in wide
    ]
    of_row = [
        halo_traffic(reaches[1], wide, outputs[1], place_bytes * length(reaches[0].needs(mine)), input_gradient=input_gradient)
        for mine in outputs[0]
    ]

    def both(phase: Literal["forward", "backward"]) -> tuple[Count, ...]:
        pairs = [(of_column[c][phase][r], of_row[r][phase][c]) for r in range(len(tall)) for c in range(len(wide))]
        return tuple(Count(one.messages + other.messages, one.nbytes + other.nbytes) for one, other in pairs)

    return {"forward": both("forward"), "backward": both("backward")}


def _counts(members: int, sent: Sequence[tuple[int, int]], row_bytes: int) -> tuple[Count, ...]:
    messages, rows = [0] * members, [0] * members
    for member, count in sent:
        messages[member] += 1
        rows[member] += count
    return tuple(Count(messages[member], rows[member] * row_bytes) for member in range(members))


def overlap(one: Range, other: Range) -> Range:
    """The rows that are in both."""
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def length(rows: Range) -> int:
    """How many they are."""
    return rows[1] - rows[0]


def _within(rows: int, first: int, last: int) -> Range:
    """The part of a range that lies in an image with ``rows`` rows."""
    start = min(max(first, 0), rows)
    return start, max(start, min(max(last, 0), rows))
