"""One forward of a divided model: each node of the graph, on activations that know where their parts are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.adaptive import DomainGlobalPool2d
from zmqtrain.parallel.domain.batch_norm import DomainBatchNorm2d
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.model.batch_norm import BatchNorm
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.rewrite.assign import Layer
from zmqtrain.parallel.rewrite.rules import Rules, map_values, strips
from zmqtrain.parallel.rewrite.spread import HEIGHT, Mover, Spread

#: Layers on strips of an image.
STRIPS = DomainLayer, DomainBatchNorm2d, DomainGlobalPool2d


class Forward:
    """Computes a graph. One a model."""

    def __init__(self, graph: fx.Graph, layers: Mapping[str, Layer], mover: Mover, rules: Rules) -> None:
        self._graph, self._layers, self._mover, self._rules = graph, layers, mover, rules
        last: dict[fx.Node, fx.Node] = {source: node for node in graph.nodes for source in node.all_input_nodes}
        self._done: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for source, node in last.items():
            self._done[node].append(source)

    def positional(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Inputs by name at their places behind ``inputs``. Raises `UsageError` for what the forward does not take."""
        names = [str(node.target) for node in self._graph.nodes if node.op == "placeholder"][len(inputs) :]
        found = [*inputs, *(named[name] for name in names[: len(named)] if name in named)]
        if len(found) != len(inputs) + len(named):
            raise UsageError(
                f"the model is called with {', '.join(named)}, but its forward takes {', '.join(names) or 'no more'}, in this "
                "order: where a model is divided, all of its first inputs must be given"
            )
        return tuple(found)

    def run(self, model: nn.Module, inputs: Sequence[Any], placement: Placement) -> Any:
        """What the model's forward returns, with `Spread` in place of tensors. ``placement``: of the inputs."""
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in self._graph.nodes:
            args, kwargs = (fx.node.map_arg(each, values.__getitem__) for each in (node.args, node.kwargs))
            target = str(node.target)
            if node.op == "placeholder":
                value = next(given, args[0] if args else None)
                values[node] = Spread(value, placement) if isinstance(value, Tensor) and value.dim() else value
            elif node.op == "get_attr":
                values[node] = _attribute(model, target)
            elif node.op == "call_module":
                values[node] = self._layer(target, args, kwargs, model.training)
            elif node.op == "call_function":
                values[node] = self._rules.function(node.target, node.name, args, kwargs, model.training)
            elif node.op == "call_method":
                values[node] = self._rules.method(target, node.name, args, kwargs, model.training)
            else:
                return args[0]
            for source in self._done[node]:
                del values[source]  # its memory is free unless backward needs it
        raise AssertionError("a graph without an output")

    def _layer(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool) -> Any:
        layer = self._layers[name]
        module, grid = layer.module, layer.assigned.grid
        if not layer.weighted:
            return self._rules.layer(module, name, args, kwargs, training)
        value = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, Spread):
            if isinstance(module, STRIPS):
                return strips(module, self._in_strips(value, layer, name))
            if isinstance(module, Linear | Convolution):
                return self._divided(module, value, layer, name)
            if isinstance(module, BatchNorm) and module.divisions is not None:
                return value_of(self._mover.over_rows(value, grid, 1, module.divisions, name), module)
        moved = map_values([list(args), dict(kwargs)], lambda each: self._brought(each, layer, name))
        return self._rules.anything(module, name, *moved)

    def _brought(self, value: Any, layer: Layer, name: str) -> Any:
        if not isinstance(value, Spread):
            return value
        grid = layer.assigned.grid
        return self._mover.on_all(value, grid, name) if layer.assigned.samples == "all" else self._mover.whole(value, name, grid)

    def _in_strips(self, value: Spread, layer: Layer, name: str) -> Spread:
        grid = layer.assigned.grid
        if value.divided == HEIGHT and value.placement.grid == grid:
            return value
        return self._mover.over_rows(value, grid, HEIGHT, bounds(self._mover.shape(value)[HEIGHT], grid.rows), name)

    def _divided(self, module: Linear | Convolution, value: Spread, layer: Layer, name: str) -> Spread:
        """Model-parallel: features that come divided are gathered by the layer itself, and their gradient is only scattered."""
        grid, dimension = layer.assigned.grid, -1 if isinstance(module, Linear) else 1
        features = dimension % value.local.dim()
        there = value.placement
        divided = value.divided == features and there.grid == grid and all(start < stop for start, stop in there.divisions)
        if not divided:
            value = self._mover.whole(value, name, grid)
        module.takes(there.divisions if divided else None)
        samples = value.placement.sample_dimension
        placement = Placement(grid, "columns", features, module.divisions, samples)
        return Spread(module(value.local), placement, module.site)


def value_of(value: Spread, module: nn.Module) -> Spread:
    """The same place for what a module makes of an activation."""
    return value.with_local(module(value.local))


def _attribute(model: nn.Module, name: str) -> Any:
    for part in name.split("."):
        model = getattr(model, part)
    return model
