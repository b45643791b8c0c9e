"""Which layer of a model is computed how: a plan, followed through the graph of the forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.rewrite.layers import Assigned, Maker, has_parameters, tied
from zmqtrain.parallel.rewrite.rules import ELEMENTWISE_LAYERS


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that the forward calls, as it is now."""

    module: nn.Module
    assigned: Assigned
    weighted: bool
    """Whether its plan decides how it is computed; layers without weights take activations as they come."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """How a model is computed."""

    layers: Mapping[str, Layer]
    """All modules that the forward calls, by name."""
    parameters: Mapping[str, Assigned]
    """The parameters and buffers that it uses by themselves, by name: how what uses them is computed."""

    def summed_over(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Over which ranks gradients of modules and parameters that are whole are summed: all those that have other samples, or
        another strip of them."""
        whole = {name: layer.assigned for name, layer in self.layers.items() if not isinstance(layer.module, Divided)}
        return {
            name: tuple(range(assigned.grid.size)) if assigned.apart else assigned.grid.row(rank)
            for name, assigned in (whole | dict(self.parameters)).items()
        }


def main_grid(plan: Plan | None, grid: Grid) -> Grid:
    """The grid whose columns say which samples a process is given: the first one by whose rows a layer is computed."""
    return next((each.grid for each in plan or () if each.grid.rows > 1 and each.choice != "batch"), grid)


def assign(model: nn.Module, graph: fx.Graph, grid: Grid, plan: Plan | None, maker: Maker, whole: Iterable[str]) -> Assignment:
    """Replace the model's layers by divided ones, in place.

    A layer that the plan does not name follows the one that its input comes from. Raises `UsageError` for a plan of another model.
    """
    main, planned, whole, shared = main_grid(plan, grid), _planned(model, plan), frozenset(whole), set(tied(model))
    first = next(iter(plan or ()), None)
    start = _normal(Assigned(first.choice, first.grid) if first else Assigned("model", grid), main)
    layers: dict[str, Layer] = {}
    parameters: dict[str, Assigned] = {}
    state: dict[fx.Node, tuple[Assigned, Divisions | None]] = {}  # how a node is computed, and how it leaves its channels divided
    for node in graph.nodes:
        inputs = [state[source] for source in node.all_input_nodes if source.op != "get_attr"]
        own, channels = inputs[0] if inputs else (start, None)
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                parameters.setdefault(str(source.target), own)
        if node.op == "call_module":
            name = str(node.target)
            if name not in layers:
                module = model.get_submodule(name)
                own = _normal(_nearest(name, planned) or own, main)
                weighted = has_parameters(module) or isinstance(module, _BatchNorm)
                if name in whole:
                    own = Assigned("whole", own.grid)
                elif weighted and _shares(name, shared):
                    maker.left_whole[name] = "it shares parameters with another layer"
                    own = Assigned("whole", own.grid)
                made = module
                if weighted:
                    made, own = maker.make(module, name, own, channels)
                    if made is not module:
                        model.set_submodule(name, made)
                layers[name] = Layer(made, own, weighted)
            layer = layers[name]
            if layer.weighted:
                own = layer.assigned
                channels = layer.module.divisions if isinstance(layer.module, Linear | Convolution) else channels
            elif type(layer.module) not in ELEMENTWISE_LAYERS and isinstance(layer.module, nn.Flatten):
                channels = None
        state[node] = own, channels
    return Assignment(layers, parameters)


def _normal(assigned: Assigned, main: Grid) -> Assigned:
    """Batch parallelism takes samples as the main grid has them, so that fewer need to move."""
    if assigned.choice == "batch" or (assigned.grid.rows == 1 and main.rows > 1):
        return Assigned("whole" if assigned.choice == "whole" else "batch", main)
    return assigned


def _planned(model: nn.Module, plan: Plan | None) -> Mapping[str, Assigned]:
    names = {name for name, _ in model.named_modules()}
    found = {each.layer: Assigned(each.choice, each.grid) for each in plan or ()}
    if missing := [name for name in found if name not in names]:
        raise UsageError(f"the plan is of another model: {type(model).__name__} has no layer {missing[0]!r}")
    return found


def _nearest(name: str, planned: Mapping[str, Assigned]) -> Assigned | None:
    """What the plan says of a module, of one that it is in, or of the first within it."""
    outer = name
    while outer:
        if outer in planned:
            return planned[outer]
        outer = outer.rpartition(".")[0]
    return next((assigned for each, assigned in planned.items() if each.startswith(f"{name}.")), None)


def _shares(name: str, shared: Iterable[str]) -> bool:
    return any(each == name or each.startswith(f"{name}.") for each in shared)
