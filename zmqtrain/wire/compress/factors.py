"""Matrices as products of two thin ones (PowerSGD; Vogels, Karimireddy, Jaggi 2019).

A matrix M of m rows and n columns is sent as P (m x r) and Q (n x r), and stands for P Q^T. In each step ``P = M Q`` with the last
step's Q, the columns of P are made orthonormal, and ``Q = M^T P``: one step of subspace iteration, so with a warm start the r
largest directions are followed while they change. What a product leaves out belongs to the next step's matrix (error feedback).

A parameter is the matrix of its first dimension by all others. Vectors, and matrices that would not shrink, are sent as they are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zmqtrain.errors import WireError
from zmqtrain.wire.compress.envelope import LARGEST_REDUCTION, aligned, as_type, require_room
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

#: Matrices in one message; the rest of a payload is sent as it is. They are listed in the header, which is limited.
MOST_MATRICES: Final = 1024
#: The highest rank: beyond this, hardly a layer shrinks much, and orthonormal columns take longer than the network.
LARGEST_RANK: Final = 64
#: A column of which less than this share is left beside the earlier ones depends on them.
_DEPENDENT: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Matrix:
    """Elements of a flat payload that are a matrix, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def rank(self, rank: int) -> int:
        """The rank of its factors if ``rank`` is asked for."""
        return min(rank, self.rows, self.columns)

    def factors(self, rank: int) -> int:
        """The number of elements of both factors."""
        return self.rank(rank) * (self.rows + self.columns)

    def shrinks(self, rank: int) -> bool:
        return self.factors(rank) < self.numel <= LARGEST_REDUCTION * self.factors(rank)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrix in a flat tensor, as a view."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a flat payload divides into matrices that are sent as factors, and the rest."""

    numel: int
    rank: int
    matrices: tuple[Matrix, ...]

    @classmethod
    def of(cls, numel: int, rank: int, matrices: Sequence[Matrix]) -> Layout:
        """The layout of a payload of ``numel`` elements that has these matrices, in ascending order."""
        useful = [matrix for matrix in matrices if matrix.shrinks(rank)]
        if len(useful) > MOST_MATRICES:  # those with the most to save
            useful = sorted(useful, key=lambda matrix: matrix.factors(rank) - matrix.numel)[:MOST_MATRICES]
        return cls(numel, rank, tuple(sorted(useful, key=lambda matrix: matrix.start)))

    @property
    def rest(self) -> tuple[tuple[int, int], ...]:
        """Start and end of what lies between the matrices."""
        ends = [0, *(matrix.stop for matrix in self.matrices)]
        starts = [*(matrix.start for matrix in self.matrices), self.numel]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    @property
    def rest_numel(self) -> int:
        return sum(stop - start for start, stop in self.rest)

    @property
    def left_numel(self) -> int:
        """The number of elements of all P."""
        return sum(matrix.rank(self.rank) * matrix.rows for matrix in self.matrices)

    @property
    def right_numel(self) -> int:
        """The number of elements of all Q."""
        return sum(matrix.rank(self.rank) * matrix.columns for matrix in self.matrices)

    def lefts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each matrix's P in ``flat``, which has all of them, as views."""
        return self._factors(flat, [matrix.rows for matrix in self.matrices])

    def rights(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each matrix's Q in ``flat``, which has all of them, as views."""
        return self._factors(flat, [matrix.columns for matrix in self.matrices])

    def _factors(self, flat: torch.Tensor, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
        start = 0
        for matrix, length in zip(self.matrices, lengths, strict=True):
            rank = matrix.rank(self.rank)
            yield flat[start : start + length * rank].view(length, rank)
            start += length * rank

    def rest_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What lies between the matrices of a flat tensor, as views."""
        return [flat[start:stop] for start, stop in self.rest]

    def joined_rest(self, flat: torch.Tensor) -> torch.Tensor:
        """The same in one tensor."""
        import torch

        return torch.cat((flat[:0], *self.rest_of(flat)))

    def first_rights(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """Where all Q start: random, but the same on all workers and in each run."""
        import torch

        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.randn(self.right_numel, generator=generator, dtype=torch.float64).to(like)

    def whole(self, flat: torch.Tensor, rest: torch.Tensor, lefts: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
        """Fill ``flat`` with the products of the factors and with the rest."""
        start = 0
        for span in self.rest_of(flat):
            span.copy_(rest[start : start + span.numel()])
            start += span.numel()
        for matrix, left, right in zip(self.matrices, self.lefts(lefts), self.rights(rights), strict=True):
            product(left, right, matrix.of(flat))
        return flat

    def warm(self, rights: torch.Tensor, before: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """What the next step starts with: ``rights``, as far as they point anywhere; scaled, which changes nothing else, since the
        squares of small gradients would be too small for their type."""
        import torch

        result = torch.empty_like(rights)
        each = zip(self.rights(rights), self.rights(before), self.rights(first), self.rights(result), strict=True)
        for now, was, start, into in each:
            if not bool(now.isfinite().all()):
                into.copy_(was)
                continue
            sizes = now.abs().amax(0)
            # A direction in which there was nothing would stay empty for ever.
            into.copy_(torch.where(sizes > 0, now / sizes.clamp_min(torch.finfo(now.dtype).tiny), start))
        return result


def lefts_of(layout: Layout, flat: torch.Tensor, rights: torch.Tensor) -> torch.Tensor:
    """All P of a flat tensor, not orthonormal yet."""
    result = flat.new_empty(layout.left_numel)
    for matrix, right, into in zip(layout.matrices, layout.rights(rights), layout.lefts(result), strict=True):
        into.copy_(matrix.of(flat) @ right)
    return result


def rights_of(layout: Layout, flat: torch.Tensor, lefts: torch.Tensor) -> torch.Tensor:
    """All Q of a flat tensor, for orthonormal P."""
    result = flat.new_empty(layout.right_numel)
    for matrix, left, into in zip(layout.matrices, layout.lefts(lefts), layout.rights(result), strict=True):
        into.copy_(matrix.of(flat).T @ left)
    return result


def orthonormal(layout: Layout, lefts: torch.Tensor) -> torch.Tensor:
    """All P with orthonormal columns that span the same space; a column that depends on earlier ones becomes 0.

    The bits of the result are the same on any processor, so that workers that compute it from the same sums stay equal."""
    import torch

    result = torch.empty_like(lefts)
    alike: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for left, into in zip(layout.lefts(lefts), layout.lefts(result), strict=True):
        rows, rank = left.shape
        alike.setdefault((1 << (rows - 1).bit_length(), rank), []).append((left, into))
    for (rows, rank), pairs in alike.items():  # many small matrices take no longer than one
        stack = torch.zeros(len(pairs), rank, rows, dtype=torch.float64, device=lefts.device)
        for each, (left, _) in zip(stack, pairs, strict=True):
            each[:, : len(left)] = left.T
        for each, (_, into) in zip(_orthonormal_rows(stack), pairs, strict=True):
            into.copy_(each[:, : len(into)].T)
    return result


def _orthonormal_rows(stack: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt on each of the matrices (one, row, element), twice for precision. Only elementwise operations, of which IEEE 754
    fixes every bit. Of a matrix that is not finite all becomes NaN."""
    import torch

    finite = stack.isfinite().all(2, keepdim=True).all(1, keepdim=True)
    stack = torch.where(finite, stack, 0.0)
    peaks = stack.abs().amax(2, keepdim=True)
    stack = stack / torch.where(peaks > 0, peaks, 1.0)  # so that squares have room
    for number in range(stack.shape[1]):
        row = stack[:, number]
        before = _sum(row * row).sqrt()
        for _ in range(2 if number else 0):
            earlier = stack[:, :number]
            shares = _sum(earlier * row.unsqueeze(1)).unsqueeze(2)
            row = row - _sum((shares * earlier).transpose(1, 2))
        size = _sum(row * row).sqrt()
        good = size > _DEPENDENT * before
        stack[:, number] = torch.where(good.unsqueeze(1), row / torch.where(good, size, 1.0).unsqueeze(1), 0.0)
    return torch.where(finite, stack, math.nan)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, always in the same order."""
    import torch

    while (length := values.shape[-1]) > 1:
        half = length // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((folded, values[..., 2 * half :]), -1) if length % 2 else folded
    return values[..., 0]


def product(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
    """``into`` becomes left right^T. The bits are the same on any processor (a matrix product's are not)."""
    import torch

    torch.mul(left[:, :1], right[:, 0], out=into)
    for number in range(1, left.shape[1]):
        into.add_(left[:, number : number + 1] * right[:, number])


def open_factors(payload: Payload, dtype: str, numel: int, rank: Value, listed: Value, meta: Value) -> Payload:
    if type(rank) is not int or not 1 <= rank <= LARGEST_RANK or type(listed) is not list:
        raise WireError(f"{payload!r} has factors of rank {rank!r:.40} of {listed!r:.40}")
    if len(listed) % 3 or not 0 < len(listed) <= 3 * MOST_MATRICES or any(type(size) is not int for size in listed):
        raise WireError(f"{payload!r} has factors of {listed!r:.40}, which is no list of matrices")
    matrices = tuple(Matrix(*listed[place : place + 3]) for place in range(0, len(listed), 3))
    stop = 0
    for matrix in matrices:
        if matrix.start < stop or min(matrix.rows, matrix.columns) < 1 or matrix.stop > numel or not matrix.shrinks(rank):
            raise WireError(f"{payload!r} has factors of {matrix!r:.100}, which is no part of {numel} elements")
        stop = matrix.stop
    layout = Layout(numel, rank, matrices)
    if (payload.dtype, payload.numel) != (dtype, layout.rest_numel + layout.left_numel + layout.right_numel):
        raise WireError(f"{payload!r} cannot be {numel} elements of {dtype} as factors of rank {rank}")
    require_room(payload, dtype, numel)
    return payload.mapped(dtype, numel, lambda packed: unpacked_factors(packed, layout, dtype), meta)


def unpacked_factors(packed: torch.Tensor, layout: Layout, dtype: str) -> torch.Tensor:
    """The elements of ``dtype`` of which ``packed`` has what lies between the matrices, then all P, then all Q."""
    import torch

    packed = aligned(packed)
    target = torch_dtype(dtype)
    work = packed.to(torch.promote_types(target, torch.float32))
    left, right = layout.rest_numel, layout.rest_numel + layout.left_numel
    rest, lefts, rights = work[:left], work[left:right], work[right:]
    return as_type(layout.whole(torch.empty(layout.numel, dtype=work.dtype, device=work.device), rest, lefts, rights), dtype)
