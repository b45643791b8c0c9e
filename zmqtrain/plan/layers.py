"""A model as the planner sees it: the shapes, sizes and times of its layers, in the order of the forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from zmqtrain.parallel.geometry import Table, Transposed, Window, adaptive
from zmqtrain.parallel.paired import Paired

#: ``conv``, ``linear``, ``embedding``, ``recurrent``, ``attention`` and ``encoder`` (layers of a transformer) can be divided by
#: their outputs; ``norm``, ``pool`` and ``own`` (parameters of a module that contains layers) work on any part of the activations,
#: and follow the layer before them. ``other`` can only be divided by samples.
Kind = Literal["conv", "linear", "embedding", "recurrent", "attention", "encoder", "norm", "pool", "own", "other"]
#: Kinds whose weights can be divided by outputs (channels, features, gates, heads).
DIVISIBLE: tuple[Kind, ...] = ("conv", "linear", "embedding", "recurrent", "attention", "encoder")
#: Kinds that leave their outputs divided, and accept each other's divided outputs.
PASSES: tuple[Kind, ...] = ("conv", "linear")


#: Which rows, or columns, of its input an operation needs.
AnyReach: TypeAlias = Window | Transposed | Table
#: Of height and width.
Reaches: TypeAlias = tuple[AnyReach, AnyReach]
#: Operations on an image, one after another.
Path: TypeAlias = tuple[Reaches, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights whose gradients are sent together: ``each`` elements for every one of ``units``, which are divided over the rows, and
    others that are whole on every row."""

    units: int = 0
    each: int = 0
    whole: int = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Activations that are added up, or used together in another way. All are brought to where the first of them lies."""

    branches: tuple[Branch, ...] = ()
    """None: the model's own input."""
    module: str = ""
    """The module in whose forward they meet."""


#: Where an activation comes from: a layer, by its name, or several that meet.
Source: TypeAlias = "str | Meeting"


@dataclass(frozen=True, slots=True)
class Branch:
    """One of the activations that meet."""

    source: Source
    numel: int
    """Elements of a sample."""


#: The source of what no layer has computed.
INPUT = Meeting()


@dataclass(frozen=True, slots=True)
class Pair:
    """Linear layers of attention or of an MLP that are divided together: the first ones by outputs, the last one by its inputs, as
    these leave them (`zmqtrain.parallel.placed.pairs`). Only if all are model-parallel on one grid."""

    last: str
    """The name of the layer that is divided by inputs."""
    divided: Paired

    def fits(self, rows: int) -> bool:
        """Whether it can be divided over ``rows`` rows."""
        return self.divided.divisions(rows) is not None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. Shapes are those of one sample: (channels, height, width), (features,) or (positions, features)."""

    name: str
    """The module's name in the model, such as ``features.3``."""
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: int = 0
    """The number of elements of all its parameters: the paper's |W|, plus biases if they are counted."""
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    transposed: bool = False
    flops: int = 0
    """Multiplications and additions in the forward of one sample; 0: not known, or negligible."""
    forward_s: float = 0.0
    """Seconds for one sample on one process; 0: not known."""
    backward_s: float = 0.0
    calls: int = 1
    """How many times a forward calls it; each call sends its activations."""
    rounds: int = 1
    """In how many successive messages its activations are sent if it is divided: the positions of a recurrent layer."""
    groups: int = 1
    """The number of groups of channels that a convolution keeps separate."""
    heads: int = 0
    """The number of attention heads, by which it is divided."""
    sums: int = 0
    """How many times, if it is divided, its outputs are summed over the rows, and its inputs' gradients in the backward: once for
    attention, and once for each half of a transformer's layer."""
    mixes: bool = False
    """Whether it needs all channels of a position at once, so that divided channels of the layer before it are gathered."""
    statistics: bool = False
    """Whether it sums statistics of channels over all samples: batch norm."""
    means: int = 0
    """Of how many groups of channels it needs means of each sample, which are sums over what is divided: group and instance
    norms."""
    running: bool = False
    """Whether it keeps running statistics of its means, which are sums over all samples."""
    adaptive: bool = False
    """Whether it pools any input to a fixed size."""
    pieces: tuple[Weights, ...] = ()
    """Its weights, by the messages in which they are sent; empty: one message with all weights, which are divided."""
    source: Source | None = None
    """Where its input comes from; ``None``: from the layer before it."""
    pair: Pair | None = None
    """The layers together with which it may be divided."""
    by_inputs: bool = False
    """Whether it is divided by its inputs, so that its outputs are summed."""
    loss_numbers: int = 0
    """If the loss takes these outputs as they are divided: how many numbers of each sample its rows tell each other. 0: it needs
    them whole."""

    @property
    def numel_in(self) -> int:
        """The number of elements of its input: the paper's d_(i-1)."""
        return math.prod(self.inputs)

    @property
    def numel_out(self) -> int:
        """The number of elements of its output: the paper's d_i, before pooling."""
        return math.prod(self.outputs)

    @property
    def image(self) -> bool:
        """Whether its input and output are images, which can be divided by height."""
        return len(self.inputs) == 3 and len(self.outputs) == 3

    @property
    def units(self) -> int:
        """The number of units by which the weights can be divided: output channels or features."""
        return self.heads or (self.outputs[0] if self.image else self.outputs[-1])

    @property
    def paired(self) -> LayerShape:
        """The layer as it is divided together with the others of its pair."""
        assert self.pair is not None
        divided = self.pair.divided
        if divided.by == "outputs":
            return replace(self, heads=divided.units)
        biases = self.weights - self.inputs[-1] * self.outputs[-1]
        pieces = (Weights(divided.units, divided.size * self.outputs[-1], biases),)
        return replace(self, heads=divided.units, by_inputs=True, pieces=pieces)

    @property
    def weights_by_message(self) -> tuple[Weights, ...]:
        """Its weights, by the messages in which they are sent."""
        if self.pieces:
            return self.pieces
        each, rest = divmod(self.weights, self.units)
        return (Weights(self.units, each, rest),)

    def most_units(self, rows: int) -> int:
        """The number of outputs on the row that has most: whole groups of a convolution, or a part of one."""
        if self.groups == 1:
            return -(-self.units // rows)
        each = self.units // self.groups
        return -(-self.groups // rows) * each if self.groups >= rows else -(-each // (rows // self.groups))

    @property
    def input_units(self) -> int:
        """The number of units by which its input is divided if it arrives divided and the layer before it does not say."""
        return self.inputs[0] if self.image else self.inputs[-1]

    @property
    def reaches(self) -> Reaches:
        """Which rows, and which columns, of its image its output ones need."""
        return self._reach(0), self._reach(1)

    def _reach(self, axis: int) -> AnyReach:
        length, outputs = self.inputs[axis + 1], self.outputs[axis + 1]
        kernel, stride, padding, dilation = (each[axis] for each in (self.kernel, self.stride, self.padding, self.dilation))
        if self.adaptive:
            return adaptive(length, outputs)
        if self.transposed:
            found = Transposed(length, kernel, stride, padding, 0, dilation)
            return replace(found, output_padding=max(0, outputs - found.outputs))
        window = Window(length, kernel, stride, padding, padding, dilation)
        if window.outputs < outputs:  # the last window extends beyond the image
            window = replace(window, ceil=True)
        return window if window.outputs == outputs else adaptive(length, outputs)

    @property
    def one_row(self) -> bool:
        """Whether it pools an image to a single row."""
        return self.pools_to_one((2, 1))

    def pools_to_one(self, parts: tuple[int, int]) -> bool:
        """Whether it pools an image to a single row or column where height and width are divided into so many parts."""
        return (
            self.adaptive and self.image and any(many > 1 and size == 1 for many, size in zip(parts, self.outputs[1:], strict=True))
        )

    @property
    def row_numel(self) -> int:
        """The number of elements in one row of the input image: X_W X_C."""
        return self.inputs[0] * self.inputs[2]

    @property
    def output_row_numel(self) -> int:
        """The number of elements in one row of the output image: Y_W Y_C."""
        return self.outputs[0] * self.outputs[2]


@dataclass(frozen=True, slots=True)
class Stage:
    """A layer with weights, and the layers after it that are divided in the same way. A plan chooses for it; the paper's layer
    i."""

    head: LayerShape
    followers: tuple[LayerShape, ...] = ()
    before: Path = ()
    """The operations on the image since the input, which determine how strips differ from even ones."""
    source: Source | None = None
    """The stages from which its input comes, by their names; ``None``: the one before it."""
    apart: int | None = None
    """How many layers follow before others' outputs are added to its own; ``None``: all."""

    @property
    def name(self) -> str:
        """The name of its first layer."""
        return self.head.name

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The first layer and those that follow it."""
        return (self.head, *self.followers)

    @property
    def weights(self) -> int:
        """The number of elements of all their parameters."""
        return sum(layer.weights for layer in self.layers)

    @property
    def numel_in(self) -> int:
        """The number of elements of a sample that it takes, over all its calls: d_(i-1)."""
        return self.head.numel_in * self.head.calls

    @property
    def numel_out(self) -> int:
        """The number of elements of a sample that it outputs, after pooling, over all its calls: d_i."""
        return self.layers[-1].numel_out * self.head.calls

    @property
    def rounds(self) -> int:
        """The number of successive messages in place of each message of other layers."""
        return self.head.rounds * self.head.calls

    @property
    def gathered_at(self) -> LayerShape | None:
        """The follower for which channels that the first layer has left divided are gathered; ``None``: they stay divided."""
        return next((layer for layer in self.followers if layer.mixes), None)

    @property
    def leaves_channels(self) -> bool:
        """Whether its outputs stay divided over the rows if it is model-parallel."""
        return self.head.kind in PASSES and self.gathered_at is None and not self.head.by_inputs

    @property
    def image_size(self) -> tuple[int, int]:
        """The numbers of rows and columns of its output image; 1 if it is no longer an image."""
        return next(((layer.outputs[1], layer.outputs[2]) for layer in reversed(self.layers) if layer.image), (1, 1))

    @property
    def leaves_strips(self) -> bool:
        """Whether its outputs stay in strips if it is domain-parallel."""
        return self.leaves((2, 1))

    def leaves(self, parts: tuple[int, int]) -> bool:
        """Whether its outputs stay in so many parts of their height and width."""
        return not any(layer.pools_to_one(parts) for layer in self.layers)

    @property
    def paired(self) -> Stage:
        """The stage as it is divided together with the others of its pair."""
        return replace(self, head=self.head.paired)

    @property
    def alone(self) -> Stage:
        """The stage up to where others' outputs are added to its own."""
        return self if self.apart is None else replace(self, followers=self.followers[: self.apart], apart=None)

    def seconds(self, flops_per_s: float, *, first: bool = False) -> tuple[float, float]:
        """Forward and backward of one sample on one process: as measured, or else from its arithmetic; 0 if no speed is given.
        ``first``: the gradient of its input is not needed, half of the backward of a single product."""
        forward = backward = 0.0
        for layer in self.layers:
            guess = layer.flops / flops_per_s if flops_per_s else 0.0
            forward += layer.forward_s or guess
            products = 1 if first and layer is self.head and layer.kind in PASSES else 2  # others are several products
            backward += layer.backward_s or products * (layer.forward_s or guess)
        return forward, backward

    def __str__(self) -> str:
        return self.name


def stages(layers: Sequence[LayerShape]) -> tuple[Stage, ...]:
    """Layers together with those that follow each. Layers without weights before all others are left out.

    What follows where branches meet follows the first of them, to where the others are brought.
    """
    found: list[tuple[LayerShape, list[LayerShape], Path, Source | None]] = []
    apart: dict[int, int] = {}
    places: dict[str, int] = {}  # of stages
    leaves: dict[str, Source] = {}  # what a layer's output is, in terms of stages
    paths: dict[str, Path] = {}
    for index, layer in enumerate(layers):
        given = layer.source if layer.source is not None else layers[index - 1].name if index else INPUT
        source, from_layer = in_stages(given, leaves), leading(given)
        path = paths.get(from_layer, ()) if from_layer is not None else ()
        if path and not (layer.image and layer.inputs[1:] == tuple(each.outputs for each in path[-1])):
            path = ()  # no longer an image
        leader = leading(source)
        if layer.weights and (layer.kind not in ("norm", "own") or not found):
            before = found[-1][0].name if found else None
            found.append((layer, [], path, None if source in (before, INPUT if before is None else before) else source))
            places[layer.name] = len(found) - 1
            source = layer.name
        elif leader is not None:
            if isinstance(source, Meeting):
                apart.setdefault(places[leader], len(found[places[leader]][1]))
            found[places[leader]][1].append(layer)
        leaves[layer.name] = source
        paths[layer.name] = (*path, layer.reaches) if layer.image and layer.kind in ("conv", "pool") else path
    return tuple(
        Stage(head, tuple(followers), before, source, apart.get(place))
        for place, (head, followers, before, source) in enumerate(found)
    )


def leading(source: Source) -> str | None:
    """The layer where an activation lies; ``None``: the model's input."""
    while isinstance(source, Meeting):
        if not source.branches:
            return None
        source = source.branches[0].source
    return source


def in_stages(source: Source, leaves: Mapping[str, Source]) -> Source:
    """A source of stages in place of layers, of which ``leaves`` says what comes from each. What is not known is left out."""
    if not isinstance(source, Meeting):
        return leaves.get(source, INPUT)
    branches: dict[Source, Branch] = {}
    for branch in source.branches:
        found = in_stages(branch.source, leaves)
        if found != INPUT:
            branches.setdefault(found, Branch(found, branch.numel))
    if len(branches) == 1:
        return next(iter(branches))
    return Meeting(tuple(branches.values()), source.module)
