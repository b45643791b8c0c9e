"""A model as the planner sees it: the shapes, sizes and times of its layers, in the order of the forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zmqtrain.parallel.geometry import Table, Transposed, Window, adaptive

#: ``conv``, ``linear``, ``embedding``, ``recurrent``, ``attention`` and ``encoder`` (layers of a transformer) can be divided by
#: their outputs; ``norm``, ``pool`` and ``own`` (parameters of a module that has layers inside) work on whatever part of the
#: activations they are given, and follow the layer before them. ``other`` can be divided by samples alone.
Kind = Literal["conv", "linear", "embedding", "recurrent", "attention", "encoder", "norm", "pool", "own", "other"]
#: Kinds whose weights can be divided by outputs (channels, features, gates, heads).
DIVISIBLE: tuple[Kind, ...] = ("conv", "linear", "embedding", "recurrent", "attention", "encoder")
#: Kinds that leave their outputs divided, and take those of each other so.
PASSES: tuple[Kind, ...] = ("conv", "linear")


@dataclass(frozen=True, slots=True)
class Weights:
    """Some of a layer's weights, whose gradients travel together: ``each`` for every one of ``units`` that are divided over the
    rows, and others that are whole on every row."""

    units: int = 0
    each: int = 0
    whole: int = 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. Shapes are those of one sample: (channels, height, width), (features,) or (positions, features)."""

    name: str
    """The module's name in the model, like ``features.3``."""
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: int = 0
    """Elements of all its parameters: the paper's |W|, and biases where they are counted."""
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    transposed: bool = False
    flops: int = 0
    """Multiplications and additions of the forward, of one sample; 0: not known, or not worth counting."""
    forward_s: float = 0.0
    """Of one sample on one process; 0: not known."""
    backward_s: float = 0.0
    calls: int = 1
    """How often a forward calls it: each call sends its activations."""
    rounds: int = 1
    """In how many messages one after another its activations travel where it is divided: the positions of a recurrent layer."""
    groups: int = 1
    """Of channels that a convolution keeps apart."""
    heads: int = 0
    """Of attention, by which it is divided."""
    sums: int = 0
    """How often its outputs are summed over the rows where it is divided, and its inputs' gradients in the backward: attention, and
    the two halves of a transformer's layer."""
    mixes: bool = False
    """Whether it needs all channels of a position at once: what a layer before it has left divided is gathered for it."""
    statistics: bool = False
    """Whether it sums statistics of channels over all samples: batch norm."""
    adaptive: bool = False
    """Whether it pools whatever it is given to a fixed size."""
    pieces: tuple[Weights, ...] = ()
    """Its weights by messages; empty: one, of which all are divided."""

    @property
    def numel_in(self) -> int:
        """Elements of its input: the paper's d_(i-1)."""
        return math.prod(self.inputs)

    @property
    def numel_out(self) -> int:
        """Elements of its output: the paper's d_i, before pooling."""
        return math.prod(self.outputs)

    @property
    def image(self) -> bool:
        """Whether it takes and gives an image, which can be divided by height."""
        return len(self.inputs) == 3 and len(self.outputs) == 3

    @property
    def units(self) -> int:
        """By what the weights can be divided: output channels or features."""
        return self.heads or (self.outputs[0] if self.image else self.outputs[-1])

    @property
    def weights_by_message(self) -> tuple[Weights, ...]:
        """Its weights as they travel."""
        if self.pieces:
            return self.pieces
        each, rest = divmod(self.weights, self.units)
        return (Weights(self.units, each, rest),)

    def most_units(self, rows: int) -> int:
        """Outputs of the row that has most: whole groups of a convolution, or a part of one."""
        if self.groups == 1:
            return -(-self.units // rows)
        each = self.units // self.groups
        return -(-self.groups // rows) * each if self.groups >= rows else -(-each // (rows // self.groups))

    @property
    def input_units(self) -> int:
        """By what its input is divided where it comes divided, if that is not known of the layer before it."""
        return self.inputs[0] if self.image else self.inputs[-1]

    @property
    def reach(self) -> Window | Transposed | Table:
        """Which rows of its image its output rows need."""
        length, outputs = self.inputs[1], self.outputs[1]
        if self.adaptive:
            return adaptive(length, outputs)
        if self.transposed:
            found = Transposed(length, self.kernel[0], self.stride[0], self.padding[0], 0, self.dilation[0])
            return replace(found, output_padding=max(0, outputs - found.outputs))
        window = Window(length, self.kernel[0], self.stride[0], self.padding[0], self.padding[0], self.dilation[0])
        if window.outputs < outputs:  # the last window stands out
            window = replace(window, ceil=True)
        return window if window.outputs == outputs else adaptive(length, outputs)

    @property
    def one_row(self) -> bool:
        """Whether it pools an image to a single row."""
        return self.adaptive and self.image and self.outputs[1] == 1

    @property
    def halo_rows(self) -> int:
        """Input rows that cross a cut between two strips, in both directions together: k - s.

        An output row begins s rows below the one before it, so of the k rows that it reads s are its strip's own.
        """
        reach, step = (self.kernel[0] - 1) * self.dilation[0] + 1, self.stride[0]
        if self.transposed:
            return max(0, math.ceil((reach - step) / step))
        return max(0, reach - step)

    @property
    def row_numel(self) -> int:
        """Elements of one row of the input image: X_W X_C."""
        return self.inputs[0] * self.inputs[2]

    @property
    def output_row_numel(self) -> int:
        """Elements of one row of the output image: Y_W Y_C."""
        return self.outputs[0] * self.outputs[2]


@dataclass(frozen=True, slots=True)
class Stage:
    """A layer with weights, and the layers behind it that are divided as it is. A plan chooses for it; the paper's layer i."""

    head: LayerShape
    followers: tuple[LayerShape, ...] = ()
    before: tuple[Window | Transposed | Table, ...] = ()
    """What has been done to the rows of the image since it came in: by which its strips follow from even ones."""

    @property
    def name(self) -> str:
        """The head's."""
        return self.head.name

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Head and followers."""
        return (self.head, *self.followers)

    @property
    def weights(self) -> int:
        """Elements of all their parameters."""
        return sum(layer.weights for layer in self.layers)

    @property
    def numel_in(self) -> int:
        """Elements of a sample that it takes, over all its calls: d_(i-1)."""
        return self.head.numel_in * self.head.calls

    @property
    def numel_out(self) -> int:
        """Elements of a sample that it hands on, after pooling, over all its calls: d_i."""
        return self.layers[-1].numel_out * self.head.calls

    @property
    def rounds(self) -> int:
        """Messages one after another for what others send in one."""
        return self.head.rounds * self.head.calls

    @property
    def gathered_at(self) -> LayerShape | None:
        """The follower for which channels that the head has left divided are gathered; ``None``: they stay so."""
        return next((layer for layer in self.followers if layer.mixes), None)

    @property
    def leaves_channels(self) -> bool:
        """Whether its outputs lie divided over the rows where it is model-parallel."""
        return self.head.kind in PASSES and self.gathered_at is None

    @property
    def image_rows(self) -> int:
        """Of the image that it hands on; 1 where that is none any more."""
        return next((layer.outputs[1] for layer in reversed(self.layers) if layer.image), 1)

    @property
    def leaves_strips(self) -> bool:
        """Whether its outputs lie in strips where it is domain-parallel."""
        return not any(layer.one_row for layer in self.layers)

    def seconds(self, flops_per_s: float, *, first: bool = False) -> tuple[float, float]:
        """Forward and backward of one sample on one process: as measured, else by the arithmetic; 0 for no speed. ``first``: nobody
        needs the gradient of its input."""
        forward = backward = 0.0
        for layer in self.layers:
            guess = layer.flops / flops_per_s if flops_per_s else 0.0
            forward += layer.forward_s or guess
            products = 1 if first and layer is self.head else 2
            backward += layer.backward_s or products * (layer.forward_s or guess)
        return forward, backward

    def __str__(self) -> str:
        return self.name


def stages(layers: Sequence[LayerShape]) -> tuple[Stage, ...]:
    """Layers with those that follow each. Layers without weights in front of all others take no part."""
    found: list[tuple[LayerShape, list[LayerShape], tuple[Window | Transposed | Table, ...]]] = []
    path: list[Window | Transposed | Table] = []
    for layer in layers:
        if path and not (layer.image and layer.inputs[1] == path[-1].outputs):
            path = []  # a branch, or no image any more
        if layer.weights and (layer.kind not in ("norm", "own") or not found):
            found.append((layer, [], tuple(path)))
        elif found:
            found[-1][1].append(layer)
        if layer.image and layer.kind in ("conv", "pool"):
            path.append(layer.reach)
    return tuple(Stage(head, tuple(followers), before) for head, followers, before in found)
