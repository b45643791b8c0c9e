"""Which part of a parameter a process holds, and whose gradients it is to be summed with.

A divided layer's parameters keep their names and hold this process's part; a `Shard` says which. So an ordinary state dict is cut
for any grid (`Shard.cut`), and gathered again from any (`gather_state`): checkpoints know nothing of grids.

=============================================  ================================================================================
a parameter of                                 its gradient is to be summed over
=============================================  ================================================================================
a model-parallel layer, divided over the rows  the row, which holds the same part and has other samples
one that is whole within a column, where each  the row: a column's processes have the same gradient already (in training all sum
process computes the same                      their shares of it, `zmqtrain.parallel.sums.contributors`)
a domain- or batch-parallel layer              all processes: each has its own strip of the image, or its own samples
=============================================  ================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Expected, Fabric, Label
from zmqtrain.parallel.placement import Divisions, Range

#: The ranges along the divided dimension that each row holds, in the order in which they lie in its part: several where a parameter
#: has several parts in one, as the gates of an LSTM.
Pieces: TypeAlias = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """How a parameter or buffer is divided among the processes of a column."""

    layer: str
    """The module's name in the model."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    members: tuple[int, ...]
    """The column's ranks, by row."""
    summed_over: tuple[int, ...]
    """The ranks whose contributions to its gradient are to be summed, its own among them."""
    dimension: int | None = None
    """Which dimension is divided; ``None``: every process holds the whole."""
    pieces: Pieces = ()

    def local_shape(self, row: int) -> tuple[int, ...]:
        """The shape of a row's part."""
        if self.dimension is None:
            return self.shape
        held = sum(stop - start for start, stop in self.pieces[row])
        return (*self.shape[: self.dimension], held, *self.shape[self.dimension + 1 :])

    def cut(self, whole: Tensor, row: int) -> Tensor:
        """A row's part of the whole tensor, in memory of its own. Raises `UsageError` if it is the tensor of another layer."""
        if tuple(whole.shape) != self.shape:
            raise UsageError(f"layer {self.layer}: a tensor of shape {tuple(whole.shape)} where the whole one has {self.shape}")
        whole = whole.detach()
        if self.dimension is None:
            return whole.clone()
        parts = [whole.narrow(self.dimension, start, stop - start) for start, stop in self.pieces[row]]
        if len(parts) == 1:  # of tensors without content torch puts parts together in Python, and imports its compiler for it
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, self.dimension)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all rows' parts."""
        assert self.dimension is not None
        whole = parts[0].new_empty(self.shape)
        for part, pieces in zip(parts, self.pieces, strict=True):
            begin = 0
            for start, stop in pieces:
                whole.narrow(self.dimension, start, stop - start).copy_(part.narrow(self.dimension, begin, stop - start))
                begin += stop - start
        return whole


def one_range(divisions: Divisions) -> Pieces:
    """The pieces of a dimension of which each row holds one range."""
    return tuple((each,) for each in divisions)


def gather_state(state: Mapping[str, Tensor], shards: Mapping[str, Shard], fabric: Fabric) -> dict[str, Tensor]:
    """The ordinary state dict of which this process holds ``state``. All processes of its column must call it."""
    return {name: whole.detach().clone() if whole is state[name] else whole for name, whole in gathered(state, shards, fabric)}


def gathered(
    state: Mapping[str, Tensor], shards: Mapping[str, Shard], fabric: Fabric, *, to: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of which this process holds ``state``, one after another, in its order. Those that are not divided may be
    the same objects. All processes of the column must take them to the end.

    ``to``: the only rank that is given them; the others send it their parts, and have nothing. They, too, must go to the end.
    """
    for name, tensor in state.items():
        shard = shards.get(name)
        if shard is None or shard.dimension is None or len(shard.members) == 1:
            if to is None or to == fabric.rank:
                yield name, tensor
            continue
        label, shapes = Label(shard.layer, "redistribute"), [shard.local_shape(row) for row in range(len(shard.members))]
        if to is None:
            yield name, shard.join(fabric.among(shard.members).all_gather(tensor.detach(), shapes, label).wait())
        elif to == fabric.rank:
            own = shard.members.index(to)
            due = [Expected(row, shape, tensor.dtype) for row, shape in enumerate(shapes) if row != own]
            parts = fabric.among(shard.members).exchange([], due, label).wait()
            yield name, shard.join([*parts[:own], tensor.detach().to(parts[0].device), *parts[own:]])
        elif to in shard.members:
            fabric.among(shard.members).exchange([(shard.members.index(to), tensor.detach())], [], label).wait()
