"""How activations pass through what has no weights: functions, methods and small layers.

Element by element nothing moves. Pooling works on whole images, on some of the channels, and on strips with halos. Flattening and
joining need the parts in order. Whatever is not known here is computed on whole activations, by every process of a column alike:
right, if not the fastest, for all that treats samples one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.events import Recorder
from zmqtrain.parallel.domain.adaptive import DomainGlobalPool2d
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.domain.make import HALO, LOCAL, domain_layer
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.dropout import AnyDropout, Masks
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.rewrite.spread import HEIGHT, Mover, Spread

Apply: TypeAlias = Callable[..., Any]

#: Layers that compute each element by itself.
ELEMENTWISE_LAYERS = LOCAL - {nn.PReLU, nn.LocalResponseNorm, nn.Softmax2d, nn.ChannelShuffle}
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_NAMES = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus", "sigmoid", "logsigmoid", "tanh"),
    *(
        "hardtanh",
        "hardsigmoid",
        "hardswish",
        "softsign",
        "threshold",
        "abs",
        "neg",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "square",
        "pow",
    ),
    *("pow", "clamp", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"),
)
_HOMES = (torch, functional, operator)
#: Functions that compute each element by itself, of one or several activations.
ELEMENTWISE: frozenset[Apply] = frozenset(
    {
        *(getattr(home, name) for name in _NAMES for home in _HOMES if hasattr(home, name)),
        *(operator.truediv, operator.neg, operator.pow, operator.iadd, operator.imul, operator.isub),
    }
)
ELEMENTWISE_METHODS = frozenset(
    {*_NAMES, *(f"{name}_" for name in _NAMES), "contiguous", "float", "double", "half", "bfloat16", "clone"}
)
#: Functions that are layers: what they are called with makes the layer.
_POOL = ("kernel_size", "stride", "padding")
_LAYERS: Mapping[Apply, tuple[type[nn.Module], tuple[str, ...]]] = {
    functional.max_pool2d: (nn.MaxPool2d, (*_POOL, "dilation", "ceil_mode", "return_indices")),
    functional.avg_pool2d: (nn.AvgPool2d, (*_POOL, "ceil_mode", "count_include_pad", "divisor_override")),
    functional.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
    functional.adaptive_max_pool2d: (nn.AdaptiveMaxPool2d, ("output_size", "return_indices")),
    functional.dropout: (nn.Dropout, ("p", "training", "inplace")),
    functional.dropout2d: (nn.Dropout2d, ("p", "training", "inplace")),
}


class Rules:
    """Computes what has no weights, on activations of any placement."""

    def __init__(self, mover: Mover, seed: int, recorder: Recorder | None = None) -> None:
        self.mover, self.seed, self.recorder = mover, seed, recorder
        self._masks: dict[str, Masks] = {}
        self._pools: dict[tuple[str, Grid], nn.Module] = {}

    def layer(self, module: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool) -> Any:
        """A layer without weights."""
        value = args[0] if args else None
        if not isinstance(value, Spread) or len(args) > 1 or kwargs:
            return self.anything(module, name, args, kwargs)
        if isinstance(module, DROPOUTS):
            return self._dropout(module, name, value, training)
        if type(module) in ELEMENTWISE_LAYERS:
            return value.with_local(module(value.local))
        if type(module) in LOCAL and value.divided == HEIGHT and value.local.dim() == HEIGHT + 2:
            return value.with_local(module(value.local))  # along channels: local response norm, softmax, shuffling
        if type(module) in HALO:
            return self._pool(module, name, value)
        if isinstance(module, nn.Flatten) and module.end_dim == -1:
            return self._flatten(value, module.start_dim, name)
        if value.placement.divided is None:
            return value.with_local(module(value.local))
        return self.anything(module, name, args, kwargs)

    def function(self, function: Apply, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool) -> Any:
        """A function of activations and other values."""
        first = args[0] if args else kwargs.get("input")
        if function is getattr:
            return self._size(first, None, name) if args[1] == "shape" else self.anything(function, name, args, kwargs)
        if function in _LAYERS and isinstance(first, Spread):
            kind, names = _LAYERS[function]
            settings = dict(zip(names, args[1:], strict=False)) | {key: value for key, value in kwargs.items() if key != "input"}
            training = bool(settings.pop("training", training))
            return self.layer(kind(**settings), name, [first], {}, training)
        if function in ELEMENTWISE:
            return self._elementwise(function, name, args, kwargs)
        if function is torch.flatten and isinstance(first, Spread):
            start, end = _flatten_arguments(args[1:], kwargs)
            return self._flatten(first, start, name) if end == -1 else self.anything(function, name, args, kwargs)
        if function is torch.cat:
            return self._cat(name, args, kwargs)
        return self.anything(function, name, args, kwargs)

    def method(self, method: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool) -> Any:
        """A method of an activation, ``args[0]``."""
        first, rest = args[0], args[1:]
        if not isinstance(first, Spread):
            return getattr(first, method)(*rest, **kwargs)
        if method in ("size", "dim"):
            return first.local.dim() if method == "dim" else self._size(first, rest[0] if rest else kwargs.get("dim"), name)
        if method in ELEMENTWISE_METHODS:
            return self._elementwise(_method(method), name, args, kwargs)
        if method == "flatten":
            start, end = _flatten_arguments(rest, kwargs)
            if end == -1:
                return self._flatten(first, start, name)
        if method in ("view", "reshape") and (sizes := _sizes(rest)) and len(sizes) == 2 and sizes[1] == -1:
            return self._flatten(first, 1, name)
        return self.anything(_method(method), name, args, kwargs)

    def anything(self, function: Apply, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """On whole activations, samples as they are."""
        found: list[Spread] = []

        def whole(value: Any) -> Any:
            if not isinstance(value, Spread):
                return value
            if value.placement.divided is not None:
                value = self.mover.whole(value, name)
            if found and value.placement != found[0].placement:
                value = self.mover.to(value, found[0].placement, name)
            found.append(value)
            return value.local

        plain_args, plain_kwargs = map_values(list(args), whole), map_values(dict(kwargs), whole)
        result = function(*plain_args, **plain_kwargs)
        if not found:
            return result
        placement = _followed(function, found[0], plain_args)
        return map_tensors(result, lambda tensor: Spread(tensor, placement))

    def _elementwise(self, function: Apply, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values = [value for value in args if isinstance(value, Spread)]
        if not values:
            return function(*args, **kwargs)
        others = [value for value in args if isinstance(value, Tensor) and value.dim()]
        if any(value.placement.divided is not None for value in values) and (
            others or len({value.local.dim() for value in values}) > 1
        ):
            return self.anything(function, name, args, kwargs)  # broadcasting might run along what is divided
        # What is divided stays so: the others are cut, which sends nothing.
        leader = max(values, key=lambda value: value.placement.divided is not None)
        moved = [self.mover.to(value, leader.placement, name).local if isinstance(value, Spread) else value for value in args]
        return leader.with_local(function(*moved, **kwargs))

    def _dropout(self, module: AnyDropout, name: str, value: Spread, training: bool) -> Spread:
        if not training or module.p == 0:
            return value
        grid = value.placement.grid
        masks = self._masks.setdefault(name, Masks(Site(name, grid, self.mover.fabric), self.mover.batch, self.seed))
        drop = masks.drop if type(module) is nn.Dropout else masks.drop_channels
        return value.with_local(drop(value.local, module.p, value.placement))

    def _pool(self, module: nn.Module, name: str, value: Spread) -> Spread:
        if value.divided == HEIGHT and value.local.dim() == HEIGHT + 2:
            site = Site(name, value.placement.grid, self.mover.fabric)
            key = (name, value.placement.grid)
            if key not in self._pools:
                division = value.placement.divisions
                self._pools[key] = domain_layer(module, name, site.column_group, division, recorder=self.recorder)[0]
            return strips(self._pools[key], value)
        return value.with_local(module(value.local))

    def _flatten(self, value: Spread, start: int, name: str) -> Spread:
        shape = self.mover.shape(value)
        start %= len(shape)
        try:
            placement = value.placement.flattened(shape, start)
        except UsageError:
            value = self.mover.whole(value, name)
            placement = value.placement.flattened(self.mover.shape(value), start)
        return replace(value, local=value.local.flatten(start), placement=placement)

    def _cat(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        parts = args[0] if args else kwargs["tensors"]
        along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if not all(isinstance(part, Spread) for part in parts):
            return self.anything(torch.cat, name, args, kwargs)
        first: Spread = parts[0]
        along %= first.local.dim()
        same = all(part.placement == first.placement for part in parts)
        if same and along not in (first.divided, first.placement.sample_dimension):
            return first.with_local(torch.cat([part.local for part in parts], along))
        return self.anything(torch.cat, name, args, kwargs)

    def _size(self, value: Any, dimension: int | None, name: str) -> Any:
        """Of the samples that are here, and of the whole otherwise: what a view of this part is given."""
        if not isinstance(value, Spread):
            return value.shape if dimension is None else value.shape[dimension]
        shape = list(value.local.shape)
        if value.divided is not None:
            shape[value.divided] = value.placement.divisions[-1][1]
        return torch.Size(shape) if dimension is None else shape[dimension]


def strips(layer: nn.Module, value: Spread) -> Spread:
    """A domain-parallel layer on a strip: the layer learns how the image is divided, and says how its output is."""
    assert isinstance(layer, DomainLayer | DomainGlobalPool2d) or hasattr(layer, "divide")
    division = value.placement.divisions
    out = layer.divide(division)  # type: ignore[operator]
    local = layer(value.local)
    if out is None:
        return Spread(local, value.placement.whole())
    return Spread(local, replace(value.placement, divided=HEIGHT, divisions=out))


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` of everything in lists, tuples and dictionaries."""
    if isinstance(value, dict):
        return {key: map_values(each, function) for key, each in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(map_values(each, function) for each in value)
    return function(value)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``function`` of every tensor."""
    return map_values(value, lambda each: function(each) if isinstance(each, Tensor) else each)


def _followed(function: Apply, value: Spread, args: Sequence[Any]) -> Placement:
    """Where the samples are after a function that may move their dimension."""
    samples, dimensions = value.placement.sample_dimension, value.local.dim()
    moved = samples
    name = getattr(function, "__name__", "")
    if name == "transpose" and len(args) == 3:
        one, other = (number % dimensions for number in args[1:])
        moved = other if samples == one else one if samples == other else samples
    elif name == "permute":
        order = [number % dimensions for number in _sizes(args[1:]) or ()]
        moved = order.index(samples)
    return replace(value.placement, sample_dimension=moved)


def _method(name: str) -> Apply:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _flatten_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    start = args[0] if args else kwargs.get("start_dim", 0)
    end = args[1] if len(args) > 1 else kwargs.get("end_dim", -1)
    return start, end


def _sizes(args: Sequence[Any]) -> list[int] | None:
    """The sizes that a view is given, as numbers or as one sequence of them."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple | torch.Size) else args
    return list(sizes) if all(isinstance(size, int) for size in sizes) else None
