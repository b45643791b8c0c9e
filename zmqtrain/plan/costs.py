"""The paper's cost model: Eq. 3 to 9 of Gholami et al., "Integrated Model, Batch, and Domain Parallelism in Training Neural
Networks" (SPAA 2018), with logarithms to base 2.

There are P = Pr x Pc processes and a batch of B. A layer takes d_(i-1) elements of a sample, returns d_i, and has |W_i| weights. A
message takes alpha seconds, and a word of ``word_bytes`` bytes takes beta. Every function returns a `LayerCost` per layer, which a
`Link` converts to seconds; the equations are their sums. A layer here is a `Stage`: a layer with weights, and the pools after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.layers import Stage
from zmqtrain.plan.link import NOTHING, ChangedByte, Changes, Cost, LayerCost
from zmqtrain.plan.placed import Lies, Placed, lacking

WORD_BYTES = 4


class Pricing(Protocol):
    """A way to calculate the cost of communication."""

    @property
    def word_bytes(self) -> int:
        """Bytes of an element."""
        ...

    @property
    def pairs(self) -> bool:
        """Whether it knows layers that are divided together (`zmqtrain.plan.layers.Pair`)."""
        ...

    @property
    def strips(self) -> bool:
        """Whether it knows images that are divided by their width, or by height and width."""
        ...

    def put_by(self, main: Grid) -> Pricing:
        """The same where processes are put on hosts by the rows of ``main``, a plan's main grid; itself if that changes nothing."""
        ...

    def layer(
        self, stage: Stage, placed: Placed, batch: int, *, first: bool, last: bool = False, joined: int = 0, told: int = 0
    ) -> LayerCost:
        """A layer's own communication.

        ``first``: the gradient of its input is not needed. ``last``: its output is needed whole, or, if ``told`` is given, by a
        loss whose rows tell each other so many numbers of each sample instead. ``joined``: its input arrives divided over the rows
        in the same way as the layer (see `joins`), into this many units; 0: it arrives as the layer needs it.
        """
        ...

    def joins(self, before: Stage, source: Placed, stage: Stage, target: Placed) -> bool:
        """Whether a layer uses the outputs of the layer before it as they are, divided over the rows; no change is then charged.
        Only layers that are placed alike do."""
        ...

    def change(self, before: Stage, source: Placed, after: Stage, target: Placed, *, back: bool = False) -> tuple[float, Cost]:
        """The cost of redistributing a layer's outputs for the next layer: messages, and the further cost of one byte of the whole
        batch's activations.

        ``back``: of redistributing their gradients in the opposite direction.
        """
        ...

    def changes(
        self, before: Stage, sources: Sequence[Placed], after: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        """The same from each of ``sources`` to each of ``targets``, which are on grids of one number of processes."""
        ...

    def meetings(
        self, before: Stage, sources: Sequence[Placed], at: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        """The same of bringing a stage's outputs to where the outputs of the stage ``at`` lie, to which they are added."""
        ...

    def returned(self, stage: Stage, placed: Placed, main: Grid, *, back: bool = False) -> Changes:
        """The same of bringing the model's output to the columns of ``main``, which have been given its samples."""
        ...

    def change_key(self, before: Stage, after: Stage) -> Hashable:
        """A key of everything in a layer and one that takes its outputs on which `changes` and `joins` depend."""
        ...


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's equations as a `Pricing`."""

    word_bytes: int = WORD_BYTES
    dx: bool = True
    """Whether the sums of input gradients are counted. They are needed, but the paper's stated figures are closer without them."""

    @property
    def pairs(self) -> bool:
        """No: each layer gathers its outputs."""
        return False

    @property
    def strips(self) -> bool:
        """No: the equations are for strips of the height."""
        return False

    def put_by(self, main: Grid) -> Paper:
        """Itself: a process is a host."""
        return self

    def layer(
        self, stage: Stage, placed: Placed, batch: int, *, first: bool, last: bool = False, joined: int = 0, told: int = 0
    ) -> LayerCost:
        grid, size = placed.grid, placed.grid.size
        samples = batch / grid.columns
        match placed.choice:
            case "batch" | "whole":  # of which the paper has none: every process of a column does the same work
                return LayerCost(dw=self._all_reduce(size, stage.weights))
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
        return self.changes(before, [source], after, [target], back=back).one()

    def changes(
        self, before: Stage, sources: Sequence[Placed], after: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        """Eq. 6, and its equivalent for other changes: the data that a process lacks."""
        held, needed = Lies.of([each.needs() for each in sources], 0), Lies.of([each.needs() for each in targets], 1)
        messages, share = lacking(needed, held) if back else lacking(held, needed)
        return Changes(np.ceil(np.log2(messages + 1)), ChangedByte(share, share, np.zeros_like(share)))

    def meetings(
        self, before: Stage, sources: Sequence[Placed], at: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        """As for the next layer: every layer leaves its outputs as it takes its inputs."""
        return self.changes(before, sources, at, targets, back=back)

    def returned(self, stage: Stage, placed: Placed, main: Grid, *, back: bool = False) -> Changes:
        """Nothing: the paper does not have it."""
        nothing = np.zeros((1, 1))
        return Changes(nothing, ChangedByte(nothing, nothing, nothing))

    def change_key(self, before: Stage, after: Stage) -> Hashable:
        """A constant: the cost depends on nothing."""
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
