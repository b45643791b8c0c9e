"""A model as the planner sees it: the shapes, sizes and times of its layers, in the order of the forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: ``conv``, ``linear``, ``embedding``, ``recurrent`` and ``attention`` can be divided by their outputs; ``norm``, ``pool`` and
#: ``own`` (parameters of a module that has layers inside) work on whatever part of the activations they are given, and follow the
#: layer before them. ``other`` can be divided by samples alone.
Kind = Literal["conv", "linear", "embedding", "recurrent", "attention", "norm", "pool", "own", "other"]
#: Kinds whose weights can be divided by outputs (channels, features, gates, heads).
DIVISIBLE: tuple[Kind, ...] = ("conv", "linear", "embedding", "recurrent", "attention")


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
        return self.outputs[0] if self.image else self.outputs[-1]

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

    def seconds(self, flops_per_s: float) -> tuple[float, float]:
        """Forward and backward of one sample on one process: as measured, else by the arithmetic; 0 for no speed."""
        forward = backward = 0.0
        for layer in self.layers:
            guess = layer.flops / flops_per_s if flops_per_s else 0.0
            forward += layer.forward_s or guess
            backward += layer.backward_s or 2 * (layer.forward_s or guess)
        return forward, backward

    def __str__(self) -> str:
        return self.name


def stages(layers: Sequence[LayerShape]) -> tuple[Stage, ...]:
    """Layers with those that follow each. Layers without weights in front of all others take no part."""
    found: list[tuple[LayerShape, list[LayerShape]]] = []
    for layer in layers:
        if layer.weights and (layer.kind not in ("norm", "own") or not found):
            found.append((layer, []))
        elif found:
            found[-1][1].append(layer)
    return tuple(Stage(head, tuple(followers)) for head, followers in found)
