"""The paper's cost model: Eq. 3 to 9 of Gholami et al., "Integrated Model, Batch, and Domain Parallelism in Training Neural
Networks" (SPAA 2018), with its logarithms to the base of 2.

P = Pr x Pc processes, batch B; a layer takes d_(i-1) elements of a sample and gives d_i, and has |W_i| weights. A message takes
alpha, and a word of ``word_bytes`` takes beta. Every function gives a `LayerCost` for each layer, whose costs become seconds by a
`Link`; the equations are their sums. A layer here is a `Stage`: one with weights, and the pools behind it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.plan.layers import Stage
from zmqtrain.plan.link import NOTHING, Cost, LayerCost
from zmqtrain.plan.placed import Placed, change

WORD_BYTES = 4


class Pricing(Protocol):
    """What communication is priced by."""

    @property
    def word_bytes(self) -> int:
        """Bytes of an element."""
        ...

    def layer(self, stage: Stage, placed: Placed, batch: int, *, first: bool, last: bool = False, joined: int = 0) -> LayerCost:
        """A layer's own communication.

        ``first``: nobody needs the gradient of its input. ``last``: its output is wanted whole. ``joined``: its input comes divided
        over the rows as it is divided itself (see `joins`), by so many units; 0: it comes as the layer needs it.
        """
        ...

    def joins(self, before: Stage, source: Placed, stage: Stage, target: Placed) -> bool:
        """Whether a layer takes the outputs of the one before it as they are, divided over the rows: no change is charged then."""
        ...

    def change(self, before: Stage, source: Placed, after: Stage, target: Placed, *, back: bool = False) -> tuple[float, Cost]:
        """To redistribute a layer's outputs for the next one: messages, and the cost beside them of one byte of the whole batch's
        activations.

        ``back``: their gradients, the other way.
        """
        ...

    def change_key(self, before: Stage, after: Stage) -> Hashable:
        """What `change` and `joins` depend on of two layers, one after the other."""
        ...


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's equations as a `Pricing`."""

    word_bytes: int = WORD_BYTES
    dx: bool = True
    """Whether the sums of input gradients are counted. They must be made; the paper's stated figures are nearer without."""

    def layer(self, stage: Stage, placed: Placed, batch: int, *, first: bool, last: bool = False, joined: int = 0) -> LayerCost:
        grid, size = placed.grid, placed.grid.size
        samples = batch / grid.columns
        match placed.choice:
            case "batch":
                return LayerCost(dw=self._all_reduce(size, stage.weights))
            case "whole":  # every process of a column does the same: the paper has no such layers
                return LayerCost(dw=self._all_reduce(grid.columns, stage.weights))
            case "model":
                return LayerCost(
                    all_gather=self._all_gather(grid.rows, samples * stage.numel_out),
                    dx=NOTHING if first or not self.dx else self._all_reduce(grid.rows, samples * stage.numel_in),
                    dw=self._all_reduce(grid.columns, stage.weights / grid.rows),
                )
            case "domain":
                rows, head = stage.head.kernel[0] // 2, stage.head
                halo, back = (samples * rows * row for row in (head.row_numel, head.output_row_numel))
                sends = rows > 0 and grid.rows > 1  # 1x1 convolutions send nothing
                return LayerCost(
                    halo=self._sent(1, halo) if sends else NOTHING,
                    halo_back=self._sent(1, back) if sends else NOTHING,
                    dw=self._all_reduce(size, stage.weights),
                )

    def joins(self, before: Stage, source: Placed, stage: Stage, target: Placed) -> bool:
        """Never: every layer gathers its outputs itself."""
        return False

    def change(self, before: Stage, source: Placed, after: Stage, target: Placed, *, back: bool = False) -> tuple[float, Cost]:
        """Eq. 6, and the same for other changes, by what lacks to a process."""
        lacking = change(target, source) if back else change(source, target)
        return float(_log(lacking.pieces)), Cost.sent(0, lacking.share)

    def change_key(self, before: Stage, after: Stage) -> Hashable:
        """Nothing."""
        return None

    def _all_gather(self, size: int, words: float) -> Cost:
        """alpha ceil(log p) + beta (p-1)/p n (Bruck)."""
        return self._sent(_log(size), (size - 1) / size * words)

    def _all_reduce(self, size: int, words: float) -> Cost:
        """2 (alpha ceil(log p) + beta (p-1)/p n): a reduce-scatter and an all-gather."""
        return self._all_gather(size, words).times(2)

    def _sent(self, messages: float, words: float) -> Cost:
        return Cost.sent(messages, words * self.word_bytes)


def _log(size: int) -> int:
    """ceil(log2)."""
    return (size - 1).bit_length()
