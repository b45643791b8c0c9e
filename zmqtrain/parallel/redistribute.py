"""From one placement to another: every process gets the block that the next layer needs, and each missing piece is sent once.

Blocks of the two placements are intersected. What a process has it keeps; every other piece comes from one of its holders, the one
that has sent least so far. All processes compute the same routes, so no process has to ask for anything.

Where each process brings a part of what several need, as between batch- and model-parallel layers of one grid, this is an
all-gather within the column, at the cost of Eq. 6 of Gholami et al. 2018, and the communicator's own is used. Before a ``flatten``
strips of an image come together in the same way; the other way round, from model to batch, nothing is sent at all.

The gradient of an activation that several processes hold is the same on all of them, and whole. So the gradient travels as the
activation did, from the target's placement to the source's: the exact adjoint, of which a process likewise sends nothing that
another has already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Expected, Fabric, Label
from zmqtrain.parallel.model.traffic import Sent, all_gather, messages
from zmqtrain.parallel.placement import Block, Placement, common, lengths, volume, within


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements, from the process that sends them (or keeps them, ``source`` = ``to``) to the one that needs them."""

    source: int
    to: int
    block: Block


@dataclass(frozen=True, slots=True)
class Gathering:
    """Processes that each bring a part of what all of them need."""

    members: tuple[int, ...]
    dimension: int
    """Along which the parts lie one after the other, in the order of ``members``."""


@dataclass(frozen=True, slots=True)
class Route:
    """What is sent so that an activation of ``shape`` comes from one placement to another."""

    source: Placement
    target: Placement
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """In an order that all processes share; without empty ones."""
    gatherings: tuple[Gathering, ...] | None
    """Where the pieces that travel are all-gathers; otherwise they are exchanged point to point."""

    def sent(self, rank: int, itemsize: int) -> Sent:
        """What a rank sends: messages, and bytes of tensors with elements of ``itemsize`` bytes."""
        if self.gatherings is None:
            return messages(volume(piece.block) * itemsize for piece in self.pieces if piece.source == rank != piece.to)
        gathering = self.gathering(rank)
        if gathering is None:
            return Sent()
        sizes = [volume(self.source.block(self.shape, member)) * itemsize for member in gathering.members]
        return all_gather(sizes, gathering.members.index(rank))

    @property
    def unchanged(self) -> bool:
        """Whether every process has just what it needs."""
        ranks = range(self.source.grid.size)
        return all(self.source.block(self.shape, rank) == self.target.block(self.shape, rank) for rank in ranks)

    def gathering(self, rank: int) -> Gathering | None:
        """The all-gather that a rank takes part in."""
        return next((each for each in self.gatherings or () if rank in each.members), None)


@lru_cache(maxsize=1024)
def route(source: Placement, target: Placement, shape: tuple[int, ...]) -> Route:
    """How an activation of ``shape`` (all samples) comes from one placement to another. Raises `UsageError`."""
    if source.grid.size != target.grid.size:
        raise UsageError(f"the grids {source.grid} and {target.grid} have different numbers of processes")
    ranks = range(source.grid.size)
    holders: dict[Block, list[int]] = {}
    for rank in ranks:
        holders.setdefault(source.block(shape, rank), []).append(rank)
    needed = [target.block(shape, rank) for rank in ranks]
    load = [0] * len(ranks)
    pieces = []
    for to in ranks:
        for block, held_by in holders.items():
            piece = common(block, needed[to])
            if piece is None:
                continue
            chosen = to
            if to not in held_by:
                chosen = min(held_by, key=lambda holder: (load[holder], (holder - to) % len(ranks)))
                load[chosen] += volume(piece)
            pieces.append(Piece(chosen, to, piece))
    return Route(source, target, shape, tuple(pieces), _gatherings(source, target, shape))


def _gatherings(source: Placement, target: Placement, shape: tuple[int, ...]) -> tuple[Gathering, ...] | None:
    """The all-gathers that do the whole of it; ``None`` if they cannot."""
    found = []
    alike: dict[Block, list[int]] = {}
    for rank in range(target.grid.size):
        alike.setdefault(target.block(shape, rank), []).append(rank)
    for block, members in alike.items():
        parts = {rank: source.block(shape, rank) for rank in members}
        if volume(block) == 0 or all(common(part, block) == block for part in parts.values()):
            continue  # nothing is missing
        ordered = sorted(members, key=lambda rank: (parts[rank], rank))
        differing = [
            dimension
            for dimension in range(len(shape))
            if any(parts[rank][dimension] != block[dimension] for rank in members if volume(parts[rank]))
        ]
        if len(differing) != 1:
            return None
        (dimension,) = differing
        end = block[dimension][0]
        for rank in ordered:
            start, stop = parts[rank][dimension]
            others = [parts[rank][each] != block[each] for each in range(len(shape)) if each != dimension]
            if any(others) or start != end:
                return None
            end = stop
        if end != block[dimension][1]:
            return None
        found.append(Gathering(tuple(ordered), dimension))
    return tuple(found)


def carry(local: Tensor, way: Route, fabric: Fabric, label: Label) -> Tensor:
    """Send and receive: this process's block in the target placement, in memory of its own."""
    rank = fabric.rank
    held, needed = way.source.block(way.shape, rank), way.target.block(way.shape, rank)
    if way.gatherings is not None:
        gathering = way.gathering(rank)
        if gathering is None:
            return local[within(needed, held)].clone() if volume(needed) else local.new_empty(lengths(needed))
        # The communicator's members are in the order of ranks, and the parts in that of their places in the activation.
        members = tuple(sorted(gathering.members))
        shapes = [way.source.local_shape(way.shape, member) for member in members]
        parts = fabric.among(members).all_gather(local, shapes, label).wait()
        return torch.cat([parts[members.index(member)] for member in gathering.members], gathering.dimension)
    return _exchange(local, way, fabric, label, held, needed)


def _exchange(local: Tensor, way: Route, fabric: Fabric, label: Label, held: Block, needed: Block) -> Tensor:
    rank = fabric.rank
    sends = [(piece.to, local[within(piece.block, held)]) for piece in way.pieces if piece.source == rank != piece.to]
    due = [piece for piece in way.pieces if piece.to == rank != piece.source]
    expected = [Expected(piece.source, lengths(piece.block), local.dtype) for piece in due]
    group = fabric.among(tuple(range(fabric.size)))
    pending = group.exchange(sends, expected, label) if sends or expected else None
    # What is here already is copied while the rest is on its way.
    result = local.new_empty(lengths(needed))
    for piece in way.pieces:
        if piece.to == rank == piece.source:
            result[within(piece.block, needed)] = local[within(piece.block, held)]
    for piece, tensor in zip(due, pending.wait() if pending is not None else (), strict=True):
        result[within(piece.block, needed)] = tensor
    return result
