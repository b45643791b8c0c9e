"""An ordinary model, divided over a grid as a plan says. Its own forward runs; what is divided are the tensors that it meets."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.deferred import Tape, fill
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.kept import links_of
from zmqtrain.parallel.placed.assign import Assigned, Assignment, assign, main_grid
from zmqtrain.parallel.placed.layers import moved
from zmqtrain.parallel.placed.padded import zero_padding
from zmqtrain.parallel.placed.swap import Swap, relink
from zmqtrain.parallel.placed.tensor import Placed, World, from_local, to_local
from zmqtrain.parallel.placement import Placement, Range, laid
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.shard import Shard, gather_state
from zmqtrain.parallel.turns import drawing

Statistics = Literal["whole", "local"]


def parallelize(
    model: nn.Module,
    grid: Grid | str,
    plan: Plan | None = None,
    *,
    fabric: Fabric,
    seed: int = 0,
    statistics: Statistics = "whole",
    whole: Iterable[str] = (),
    strict: bool = False,
    recorder: Recorder | None = None,
    sizes: Mapping[str, int] | None = None,
    tape: Tape | None = None,
) -> ParallelModel:
    """Divide a model over the processes of a grid (Gholami et al. 2018). All of them call it, with equal models.

    The model belongs to the result, which has the same parameters under the same names, of which each process holds a part. Its
    forward runs as it is. Gradients are of this process's contribution: sum them (`zmqtrain.parallel.sums.sum_gradients`).

    Args:
        model: any module. What has no rule for divided tensors is computed on gathered ones, which is slower, and noted in
            `ParallelModel.left_whole`.
        grid: Pr x Pc, like ``"2x2"``: for layers that the plan does not name, and where there is none.
        plan: how each layer is divided; without one, everything is model-parallel over the rows that can be.
        fabric: this process's connections to the others.
        seed: of dropout's masks and of what the forward draws, the same on all processes.
        statistics: of batch norm: of the group's whole batch, as one process has them, or of this process's samples.
        whole: names of modules whose weights are to be left whole.
        strict: whether a layer that cannot be divided as planned is an error, and an operator without a rule; otherwise it is left
            whole, and `ParallelModel.left_whole` says why.
        recorder: of the spans of layers on strips: interior, rim, and waiting for a halo.
        sizes: parameters of each layer of what ``model`` is a part of, where it is one.
        tape: of a model that was made by `zmqtrain.parallel.deferred`: its tensors are made one after another, and cut at once.

    Raises `UsageError` for a plan of another model, a compiled model, and, if ``strict``, a layer that cannot be divided.
    """
    grid = Grid.parse(grid) if isinstance(grid, str) else grid
    for what, size in (("grid", grid.size), ("plan", plan.size if plan else grid.size)):
        if size != fabric.size:
            raise UsageError(f"the {what} is for {size} processes, and the group has {fabric.size}")
    for name, module in model.named_modules():
        compiled = _compiled_by(module)
        if compiled:
            raise UsageError(
                f"{f'layer {name}' if name else type(model).__name__} is compiled ({compiled}), and compiled code cannot be "
                "divided: give the model as it was before"
            )
    sizes = sizes or layer_sizes(model)
    assignment = assign(model, grid, plan, fabric, whole=whole, strict=strict)
    _cut(model, assignment, fabric.rank, () if tape is None else _make(model, assignment, fabric.rank, tape))
    if tape is not None:
        model = model.to(tape.device)
    world = World(
        fabric, main_grid(plan, grid), seed=seed, statistics=statistics, recorder=recorder or NullRecorder(), strict=strict
    )
    return ParallelModel(model, world, assignment, sizes)


def _compiled_by(module: nn.Module) -> str:
    """What has compiled its code; empty if it is Python."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # takes seconds to import, and nothing is compiled without it
    if (compiler is not None and isinstance(module, compiler.OptimizedModule)) or module._compiled_call_impl is not None:
        return "torch.compile"
    return "torch.jit" if isinstance(module, torch.jit.ScriptModule) else ""


def layer_sizes(model: nn.Module) -> dict[str, int]:
    """The parameters of each layer that has any of its own."""
    return {
        layer: numel
        for layer, module in model.named_modules()
        if (numel := sum(parameter.numel() for parameter in module.parameters(recurse=False)))
    }


def _make(model: nn.Module, assignment: Assignment, rank: int, tape: Tape) -> list[Tensor]:
    """Give deferred tensors content, of which this process's parts are kept. Returns these."""

    def part(name: str, whole: Tensor) -> Tensor:
        shard = assignment.held[name].shard
        return whole if shard.dimension is None else shard.cut(whole, shard.members.index(rank))

    return fill(model, tape, part)


def _cut(model: nn.Module, assignment: Assignment, rank: int, parts: Iterable[Tensor] = ()) -> None:
    """Leave this process's parts in the modules. ``parts``: tensors that are parts already."""
    done: dict[int, Tensor] = {id(part): part for part in parts}
    made = set(done)
    links = links_of(model)
    for name, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for each, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                shard = assignment.held[f"{name}.{each}" if name else each].shard
                if shard.dimension is None or id(tensor) in made:
                    continue
                if id(tensor) not in done:
                    part = shard.cut(tensor, shard.members.index(rank))
                    done[id(tensor)] = nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part
                    made.add(id(done[id(tensor)]))
                tensors[each] = done[id(tensor)]
        if isinstance(module, nn.RNNBase):
            relink(module)
    for link in links:
        link.replace(done)


class ParallelModel(nn.Module):
    """A divided model. Made by `parallelize`. Set ``batch.size`` and ``batch.step`` before a forward."""

    def __init__(self, model: nn.Module, world: World, assignment: Assignment, sizes: Mapping[str, int]) -> None:
        """Not to be called from outside."""
        super().__init__()
        self.training = model.training
        self._world, self._assignment = world, assignment
        self._inner = (model,)  # not registered: names stay the model's
        self._swap = Swap(model, world, assignment.held)
        self.grid = world.grid
        """The grid whose columns say which samples a process is given."""
        self.fabric, self.batch = world.fabric, world.batch
        self.output_placement = laid(world.grid)
        """Where the last output lies: whose samples it is of."""
        self.sizes = sizes
        """Parameters of each layer of the whole, undivided model, by the layer's name."""
        self._recomputing: ExitStack | None = None
        self.keeps_divided = False
        """Whether a forward in training returns a `Placed`, where the last layer has left its outputs divided over the rows."""
        self.gives_columns = False
        """Whether outputs are always of the column's samples, on all its rows, also where the last layer is batch-parallel."""
        self._runs: Callable[..., Any] = model.__call__
        # What the model calls its own may be called as something here is: `grid`, `batch`, `samples`.
        # The same dictionaries: what its forward registers is here, too.
        for each in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[each] = vars(model)[each]
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(_Entering(world, name, self._entry(module, name))))
            self._hooks.append(module.register_forward_hook(_Leaving(world), always_call=True))
        self._hooks += zero_padding(model)

    def run_by(self, forward: Callable[..., Any]) -> None:
        """Let ``forward`` be called for the model's own forward, instead of the model, whose hooks are called elsewhere."""
        self._runs = forward

    def watch_uses(self, outside: Callable[[Callable[..., Any]], None]) -> None:
        """Call ``outside`` with each function of torch that is given a tensor within the divided model (`World.outside`)."""
        self._world.outside = outside

    def release(self) -> None:
        """Remove what was added to the modules of the model, which is not divided any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _entry(self, module: nn.Module, name: str) -> Assigned | None:
        """Where a module that is planned as one layer takes its input, so that the sums within it lie there, too."""
        held = self._assignment.held.get(f"{name}.linear1.weight" if name else "linear1.weight")
        return held.assigned if isinstance(module, nn.TransformerEncoderLayer) and held is not None else None

    @property
    def left_whole(self) -> Mapping[str, str]:
        """Layers that could not be divided as planned, and what was computed on gathered tensors in forwards so far, and why."""
        return self._assignment.left_whole | self._world.gathered

    @property
    def overlap(self) -> bool:
        """Whether the interiors of strips are computed while their halos are on their way."""
        return self._world.overlap

    @overlap.setter
    def overlap(self, wanted: bool) -> None:
        self._world.overlap = wanted

    @property
    def shares(self) -> dict[str, float]:
        """Which part of each layer's work on its column's samples this process does, by the layer's name: of strips, of samples, or
        of parameters."""
        own: dict[str, int] = {}
        for name, parameter in self.named_parameters():
            layer = self._assignment.held[name].shard.layer
            own[layer] = own.get(layer, 0) + parameter.numel()
        found = {}
        for held in self._assignment.held.values():
            layer, choice, grid = held.shard.layer, held.assigned.choice, held.assigned.grid
            if layer not in own or not self.sizes.get(layer):
                continue
            columns = self.grid.columns / (grid.size if choice == "batch" else grid.columns)
            part = 1 / grid.rows if choice == "domain" else own[layer] / self.sizes[layer] if choice == "model" else 1.0
            found[layer] = part * columns
        return found

    @property
    def inner(self) -> nn.Module:
        """The model that was divided: its own modules, which hold this process's parts."""
        return self._inner[0]

    def train(self, mode: bool = True) -> ParallelModel:
        super().train(mode)
        self._inner[0].train(mode)
        return self

    def samples(self, batch: int) -> Range:
        """Which of ``batch`` samples this process is to be given: those of its column."""
        return laid(self.grid).samples_of(batch, self.fabric.rank)

    def output_range(self) -> slice:
        """Which of the samples that this process was given the last output is of."""
        start, _ = self.samples(self.batch.size)
        first, last = self.output_placement.samples_of(self.batch.size, self.fabric.rank)
        return slice(first - start, last - start)

    @property
    def counts_output(self) -> bool:
        """Whether this process is the one that counts of those that have the last output of the same samples
        (``output.copies``)."""
        return self.output_placement.copies == 1 or self.output_placement.grid.place(self.fabric.rank)[0] == 0

    def shards_by_name(self) -> dict[str, Shard]:
        """How each parameter and buffer is divided, by its name."""
        return {name: held.shard for name, held in self._assignment.held.items()}

    def whole_state(self) -> dict[str, Tensor]:
        """The ordinary model's state dict. All processes of a column must call it."""
        return gather_state(self.state_dict(), self.shards_by_name(), self.fabric)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The samples of this process's column (`samples`) to the output for them, or for its share of them (`output_range`).

        Tensors have samples along their first dimension, or 1 there, as positions for all samples do; any other that has no samples
        is to be given by `same`. Raises `UsageError` where there are more or fewer samples than due.
        """
        size = self.batch.size
        if not size:
            raise UsageError("set batch.size of the divided model to the samples of the whole group before a forward")
        self._backward_ended()  # where the last one ended with an error
        start, stop = self.samples(size)
        due = any(value.dim() and value.shape[0] == stop - start for value in _tensors((inputs, named)))
        given = map_tensors((inputs, named), lambda value: self._given(value, broadcast=due))
        # What is computed again in backward is computed to its end: ranks without anything in their strips save fewer tensors.
        with self._drawing(), self._swap.during(), set_checkpoint_early_stop(False):
            output = map_tensors(self._runs(*given[0], **given[1]), self._placed)
        map_tensors(output, self._await_backward)
        self.output_placement = self._of_samples(output)
        keeps = self.keeps_divided and self.training and isinstance(output, Placed) and output.divided is not None
        if keeps and output.placement.grid == self.output_placement.grid:
            return output
        return map_tensors(output, self._given_out)

    def _of_samples(self, output: Any) -> Placement:
        """Whose samples outputs are of: those that each process has, if all outputs lie alike and it was given these samples;
        otherwise the column's."""
        columns = laid(self.grid)
        found: set[Placement] = set()
        for value in _tensors(output):
            if not isinstance(value, Placed):
                continue
            there = value.placement
            if there.sample_dimension is None:
                if value.dim() and value.shape[0] == self.batch.size:
                    found.add(columns)
            elif self.gives_columns or (there.grid != self.grid and self.grid.columns > 1):
                found.add(columns)
            else:
                found.add(laid(there.grid, there.samples))
        return found.pop() if len(found) == 1 else columns

    def _placed(self, value: Tensor) -> Tensor:
        """An output. One that the forward has made as a plain tensor, and written into, is whole on all processes."""
        if isinstance(value, Placed) or type(value) not in (Tensor, nn.Parameter):
            return value
        return from_local(value, self._world.whole_of(self.grid), value.shape, self._world)

    def _await_backward(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            value.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return value

    def _backward_begins(self, _gradient: Tensor) -> None:
        """Parts of a forward that backward computes again (`torch.utils.checkpoint`) find the same parameters as the first time."""
        if self._recomputing is None:
            self._recomputing = ExitStack()
            with torch.enable_grad():
                self._recomputing.enter_context(self._swap.during())
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._recomputing is not None:
            ended, self._recomputing = self._recomputing, None
            ended.close()

    def break_off(self) -> None:
        """A forward or a backward has ended with an error, and none follows: let the modules have their own tensors again. Raises
        the error of the network where a forward had put something else in their place, of which others have parts."""
        self._backward_ended()

    def whole(self, output: Placed) -> Tensor:
        """What a forward has returned divided, brought together: the column's samples."""
        return to_local(output, laid(output.placement.grid), self._world, layer="output")

    def own(self, output: Placed) -> Tensor:
        """This process's part of what a forward has returned divided."""
        return to_local(output, output.placement, self._world, layer="output")

    def same(self, value: Tensor) -> Tensor:
        """A tensor without samples that is the same on all processes, for a forward: a mask of (times, times), positions."""
        return from_local(value, self._world.whole_of(self.grid), value.shape, self._world)

    def _given(self, value: Tensor, *, broadcast: bool) -> Tensor:
        if not value.dim() or isinstance(value, Placed):
            return value
        start, stop = self.samples(self.batch.size)
        # Where a column has a single sample, 1 means that one there: no column may take it for all.
        if broadcast and value.shape[0] == 1 and self.batch.size // self.grid.columns > 1:
            return self.same(value)
        if value.shape[0] != stop - start:
            raise UsageError(
                f"rank {self.fabric.rank} was given a tensor of shape {tuple(value.shape)}; of a batch of {self.batch.size} its "
                f"column has {stop - start} samples, and they must be the first dimension of all that a divided model is given: "
                "give a tensor without samples by same() of the divided model (a task does so in Task.forward), and samples of "
                "different lengths as one tensor: pad them"
            )
        return from_local(value, laid(self.grid), (self.batch.size, *value.shape[1:]), self._world)

    def _given_out(self, value: Tensor) -> Tensor:
        world = self._world
        if not isinstance(value, Placed):
            return value
        there = value.placement
        if there.sample_dimension is None and value.dim() and value.shape[0] == self.batch.size:
            return to_local(value, laid(self.grid), world, layer="output")
        unit = there.sample_unit
        if there.sample_dimension is None:
            whole = world.whole_of(self.grid)
            # The loss of each column has its own part in it; of each process, where there are outputs of its own share beside it.
            of = "all" if self.output_placement.samples == "all" else "row"
            columns = laid(self.grid, sample_dimension=None, summands=of)
            return to_local(value, whole, world, gradient=columns, layer="output")
        target = laid(
            self.output_placement.grid, self.output_placement.samples, sample_dimension=there.sample_dimension, sample_unit=unit
        )
        if there.divided is not None or there.grid != target.grid or there.summands != "none":
            first = laid(there.grid, there.samples, sample_dimension=there.sample_dimension, sample_unit=unit)
            value = from_local(to_local(value, first, world, layer="output"), first, value.shape, world)
        return to_local(value, target, world, layer="output")

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """What the forward draws is the same on all processes, and another in each step."""
        if any(each.is_meta for each in self.parameters()):
            # Nothing is drawn. Operators of modelled compute wait for time to pass here, and others must be able to run meanwhile.
            yield
            return
        devices = sorted({each.device.index or 0 for each in self.parameters() if each.device.type == "cuda"})
        with drawing(step_seed(self._world.seed, self.batch.step), devices):
            yield

    def extra_repr(self) -> str:
        return f"grid {self.grid}, rank {self.fabric.rank}"


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def add(each: Tensor) -> Tensor:
        found.append(each)
        return each

    map_tensors(value, add)
    return found


def step_seed(seed: int, step: int) -> int:
    """The seed of torch's generator in the forward of a step."""
    return (seed * 1_000_003 + step * 7_919 + 12_345) % (1 << 63)


class _Entering:
    """The module's forward begins: what it sends is its own."""

    def __init__(self, world: World, name: str, entry: Assigned | None) -> None:
        self._world, self._name, self._entry = world, name, entry

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        self._world.layers.append(self._name)
        if self._entry is None or self._entry.choice == "domain" or not inputs:
            return None
        first, *others = inputs
        return (moved(first, self._entry.choice, self._entry.grid, self._name, self._world), *others)


class _Leaving:
    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if len(self._world.layers) > 1:
            self._world.layers.pop()


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``function`` of every tensor in nested containers, mappings and dataclasses."""

    def leaf(each: Any) -> Any:
        if isinstance(each, Tensor):
            return function(each)
        if isinstance(each, Mapping) and not isinstance(each, dict):
            found = copy.copy(each)
            for key, inner in each.items():
                found[key] = map_tensors(inner, function)  # type: ignore[index]
            return found
        if is_dataclass(each) and not isinstance(each, type):
            made = copy.copy(each)
            for entry in fields(each):
                object.__setattr__(made, entry.name, map_tensors(getattr(each, entry.name), function))
            return made
        return each

    return pytree.tree_map(leaf, value)
