"""A model in two phases: what workers compute, and what the FC server computes after them.

Each process builds the whole model from the same seed, and keeps its phase: a module with the ordinary names of its parameters, so
the state dicts of the two together are the ordinary model's. `torch.fx` traces the forward, once in training and once in evaluation
mode, and `zmqtrain.merged_fc.cut` decides where it is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from zmqtrain.errors import UsageError
from zmqtrain.membership.alike import Facts
from zmqtrain.merged_fc.cut import ForwardStep, StepKind, second_phase
from zmqtrain.merged_fc.trace import WITHOUT_GRADIENTS, traced
from zmqtrain.parallel.placed.model import layer_sizes
from zmqtrain.topology.schema import Topology
from zmqtrain.train.adapted_schedule import Schedule
from zmqtrain.train.alike import facts_of_training
from zmqtrain.train.device.base import Device
from zmqtrain.train.task import Task, build_model, build_optimizer

PhaseName: TypeAlias = Literal["convolution", "fc"]

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_SEQUENCES = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)
_LINEARS = (nn.Linear, nn.Bilinear)
#: Functions that count as layers, by name.
_FUNCTIONS: Mapping[str, StepKind] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "convolution"),
    **dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward", "embedding"), "sequence"),
    "linear": "linear",
}
#: Names of functions that change their first argument, beside those that end with an underscore.
_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ior", "iand"})


class Phase(nn.Module):
    """One of a model's two phases. Made by `split_model`.

    The convolution phase maps the model's inputs to a tuple of tensors, which the FC phase maps to the model's output.
    """

    def __init__(self, model: nn.Module, name: PhaseName, graphs: Mapping[bool, fx.GraphModule], sizes: Mapping[str, int]) -> None:
        """Use `split_model` to make one. ``graphs``: keyed by whether the mode is training."""
        super().__init__()
        self.training = model.training
        self.name: PhaseName = name
        self.sizes = sizes
        """The number of parameters of each layer of the whole model, by the layer's name."""
        self.writes_inputs = _writes_inputs(graphs[True])
        """Whether the forward may modify its inputs."""
        # A tuple, so that their modules are only registered below, with the same names.
        self._graphs = (graphs[False], graphs[True])
        for child_name, child in model.named_children():
            self.add_module(child_name, child)
        for parameter_name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(parameter_name, parameter)
        for buffer_name, buffer in model.named_buffers(recurse=False):
            persistent = buffer_name not in model._non_persistent_buffers_set
            self.register_buffer(buffer_name, buffer, persistent=persistent)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The forward that was traced in the current mode."""
        graph = self._graphs[self.training]
        # Tensors of the model's own: as they are now, for a divided phase has others in its forward.
        for own, theirs in ((self._parameters, graph._parameters), (self._buffers, graph._buffers)):
            for name in theirs:
                theirs[name] = own.get(name, theirs[name])  # type: ignore[arg-type,assignment]
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # as before, also where it raises in a part without gradients
            return graph(*inputs, **named)

    def extra_repr(self) -> str:
        return f"{self.name} phase"


def split_model(model: nn.Module, name: PhaseName, split: str | None = None) -> Phase:
    """One phase of the model; the other's layers are removed from it. Move the model to its device first.

    ``split``: the module at which the FC phase starts; ``None``: it is found automatically. Raises `UsageError`, which says what to
    do, if the model cannot be split.
    """
    sizes = layer_sizes(model)
    was = model.training
    cuts = {training: _Cut(model.train(training), split) for training in (True, False)}
    model.train(was)
    first, second = (frozenset().union(*(each.tensors(of) for each in cuts.values())) for of in (False, True))
    _check(model, first, second, frozenset().union(*(each.changed_buffers() for each in cuts.values())))
    graphs = {training: cut.graph_module(name == "fc") for training, cut in cuts.items()}
    kept = second if name == "fc" else frozenset(map(id, _tensors(model))) - (second - first)
    _keep(model, kept)
    return Phase(model, name, graphs, sizes)


def build_phase(task: Task, name: PhaseName, topology: Topology, device: Device) -> tuple[Phase, Optimizer, Schedule | None, Facts]:
    """Build the whole model, and keep one phase of it, with an optimizer of only this phase's parameters. Called in the compute
    thread, with torch seeded. Also returns what all processes must have alike, of the whole model.

    The optimizer keeps all its parameter groups; some may be empty. Raises `TaskError`, and `UsageError` if the model cannot be
    split.
    """
    model = build_model(task).to(device.torch_device)
    optimizer, schedule = build_optimizer(task, model, topology)
    facts = facts_of_training(model, optimizer, task.loss)
    phase = split_model(model, name, topology.exchange.split)
    own = {id(parameter) for parameter in phase.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
    return phase, optimizer, schedule, facts


class _Cut:
    """The forward in the model's current mode, and which of its nodes belong to the second phase."""

    def __init__(self, model: nn.Module, split: str | None) -> None:
        self._model = model
        try:
            self._graph = _graph_of(model)
        except UsageError as error:
            raise UsageError(f"the model cannot be split in two phases: {error}") from error
        steps = [
            ForwardStep(
                node.name,
                tuple(source.name for source in node.all_input_nodes),
                _kind(model, node),
                str(node.target) if node.op == "call_module" else "",
                node.op != "placeholder",
                _written(node),
            )
            for node in self._graph.nodes
        ]
        second = second_phase(steps, split)
        self._second = {node: node.name in second for node in self._graph.nodes}
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        if not self._second[output]:
            raise UsageError(f"[exchange] split = {split!r}: the model's output does not depend on that module")
        # Parameters and buffers are read where they are used, and do not pass from phase to phase.
        crossing = {
            source: None
            for node in self._graph.nodes
            if self._second[node]
            for source in node.all_input_nodes
            if not self._second[source] and source.op != "get_attr"
        }
        self._crossing = [node for node in self._graph.nodes if node in crossing]

    def tensors(self, second: bool) -> frozenset[int]:
        """The ``id`` of each parameter and buffer that a phase uses."""
        found: set[int] = set()
        for node in self._graph.nodes:
            if node.op == "call_module" and self._second[node] == second:
                found.update(map(id, _tensors(self._model.get_submodule(str(node.target)))))
            elif node.op == "get_attr" and any(self._second[user] == second for user in node.users):
                found.add(id(_attribute(self._model, str(node.target))))
        return frozenset(found)

    def changed_buffers(self) -> frozenset[str]:
        """The names of buffers that an operation of the forward changes in place."""
        names = {node.name: str(node.target) for node in self._graph.nodes if node.op == "get_attr"}
        return frozenset(names[written] for node in self._graph.nodes if (written := _written(node)))

    def graph_module(self, second: bool) -> fx.GraphModule:
        """Make a module of one phase's operations. ``second``: of the FC phase, whose inputs are the convolution phase's
        outputs."""
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        if second:
            for node in self._crossing:
                copied[node] = graph.placeholder(node.name)
        for node in self._graph.nodes:
            used = any(self._second[user] == second for user in node.users)
            here = used if node.op == "get_attr" else self._second[node] == second
            if here and node not in copied:
                with _as_traced(graph, node):
                    copied[node] = graph.node_copy(node, copied.__getitem__)
        if not second:
            graph.output(tuple(copied[node] for node in self._crossing))
        return fx.GraphModule(self._model, graph)


@contextmanager
def _as_traced(graph: fx.Graph, node: fx.Node) -> Iterator[None]:
    """Nodes that are added to the graph are computed without gradients, if ``node`` was."""
    if WITHOUT_GRADIENTS not in node.meta or node.op == "get_attr":
        yield
        return
    before = graph.call_function(torch.is_grad_enabled)
    graph.call_function(torch._C._set_grad_enabled, (False,))
    yield
    graph.call_function(torch._C._set_grad_enabled, (before,))


def _written(node: fx.Node) -> str:
    """The name of the step that reads the buffer which an operation changes in place; empty if it changes none."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or node.kwargs.get("inplace") is True
    if node.op not in ("call_method", "call_function") or not (in_place or "out" in node.kwargs):
        return ""
    target = node.kwargs.get("out", node.args[0] if node.args else None)
    while isinstance(target, fx.Node) and target.op in ("call_method", "call_function") and target.args:
        target = target.args[0]  # it may be a view
    return target.name if isinstance(target, fx.Node) and target.op == "get_attr" else ""


def _graph_of(model: nn.Module) -> fx.Graph:
    """The traced forward, in which modules that cannot be traced are calls."""
    try:
        return traced(model)
    except UsageError:
        whole = frozenset(_untraceable(model))
        if "" in whole:
            raise
        return traced(model, whole)


def _untraceable(model: nn.Module) -> Iterator[str]:
    """Names of the innermost modules that cannot be traced; an empty name stands for the model itself."""
    found: list[str] = []
    for name, child in model.named_children():
        if not type(child).__module__.startswith("torch.nn") or isinstance(child, nn.Sequential):
            try:
                traced(child)
            except UsageError:
                found += [f"{name}.{inner}" if inner else name for inner in _untraceable(child)]
    return iter(found or [""])


def _kind(model: nn.Module, node: fx.Node) -> StepKind:
    if node.op == "call_function":
        return _FUNCTIONS.get(getattr(node.target, "__name__", ""), "other")
    if node.op != "call_module":
        return "other"
    within = list(model.get_submodule(str(node.target)).modules())
    kinds: tuple[tuple[StepKind, tuple[type[nn.Module], ...]], ...] = (
        ("convolution", _CONVOLUTIONS), ("sequence", _SEQUENCES), ("linear", _LINEARS),
    )  # fmt: skip
    return next((kind for kind, types in kinds if any(isinstance(module, types) for module in within)), "other")


def _check(model: nn.Module, first: frozenset[int], second: frozenset[int], changed: frozenset[str]) -> None:
    """Raise `UsageError` if a phase has nothing to train, or both phases train the same parameter, or use a buffer that the forward
    changes (``changed``)."""
    for name in sorted(changed):
        if id(_attribute(model, name)) in first & second:
            raise UsageError(
                f"the model cannot be split in two phases: both use {name}, which the forward changes. Name another module "
                "in [exchange] split, or set merged_fc = false"
            )
    trained = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    shared = [name for name, parameter in trained.items() if id(parameter) in first & second]
    if shared:
        raise UsageError(
            f"the model cannot be split in two phases: both use the parameter {' = '.join(shared[:4])}. Untie it, name another "
            "module in [exchange] split, or set merged_fc = false"
        )
    for phase, tensors in (("before", first), ("behind", second)):
        if not any(id(parameter) in tensors for parameter in trained.values()):
            raise UsageError(
                f"the model cannot be split in two phases: nothing {phase} the split has parameters to train. Name another module "
                "in [exchange] split, or set merged_fc = false"
            )


def _keep(module: nn.Module, kept: Iterable[int]) -> None:
    """Remove all parameters and buffers except ``kept`` from a module and its submodules, and then empty submodules."""
    kept = frozenset(kept)
    # Before anything is removed: a module may have several names.
    held = {child for each in module.modules() for child in each.children() if any(True for _ in _tensors(child))}
    for each in list(module.modules()):
        for table in (each._parameters, each._buffers):
            for name in [name for name, tensor in table.items() if tensor is not None and id(tensor) not in kept]:
                del table[name]
    for each in list(module.modules()):
        for name, child in list(each._modules.items()):
            if child in held and not any(True for _ in _tensors(child)):
                del each._modules[name]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _attribute(model: nn.Module, name: str) -> Any:
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _writes_inputs(graph: fx.GraphModule) -> bool:
    """Whether a step other than a linear layer uses an input directly: it may work in place."""
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    users = {user for node in given for user in node.users}
    return not all(user.op == "call_module" and type(graph.get_submodule(str(user.target))) is nn.Linear for user in users)
