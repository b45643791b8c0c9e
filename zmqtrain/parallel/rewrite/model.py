"""An ordinary model, divided over a grid as a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, fx, nn

from zmqtrain.errors import UsageError
from zmqtrain.events import Recorder
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.dropout import Batch
from zmqtrain.parallel.placement import Placement, Range
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.rewrite.assign import assign, main_grid
from zmqtrain.parallel.rewrite.forward import Forward
from zmqtrain.parallel.rewrite.layers import Maker, Statistics
from zmqtrain.parallel.rewrite.rules import Rules, map_values
from zmqtrain.parallel.rewrite.spread import Mover, Spread
from zmqtrain.parallel.rewrite.trace import traced
from zmqtrain.parallel.shard import Shard, gather_state, shards_of


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
    graph: fx.Graph | None = None,
    sizes: Mapping[str, int] | None = None,
) -> ParallelModel:
    """Divide a model over the processes of a grid (Gholami et al. 2018). All of them call it, with equal models.

    The model's layers are replaced in place and belong to the result, which has the same parameters under the same names, of which
    each process holds a part. Gradients are of this process's contribution: sum them (`zmqtrain.parallel.sums.sum_gradients`).

    Args:
        model: whatever `torch.fx` can trace: branches must not depend on values.
        grid: Pr x Pc, like ``"2x2"``: for layers that the plan does not name, and where there is none.
        plan: how each layer is divided; without one, everything is model-parallel over the rows that can be.
        fabric: this process's connections to the others.
        seed: of dropout's masks, the same on all processes.
        statistics: of batch norm: of the group's whole batch, as one process has them, or of this process's samples.
        whole: names of modules to be left whole, which are not traced.
        strict: whether a layer that cannot be divided as planned is an error; otherwise it is left whole, and
            `ParallelModel.left_whole` says why.
        recorder: of the spans of layers on strips: interior, rim, and waiting for a halo.
        graph: of the model's forward, where it was traced before.
        sizes: parameters of each layer of what ``model`` is a part of, where it is one.

    Raises `UsageError` for a plan of another model, a model that cannot be traced, and, if ``strict``, a layer that cannot be
    divided.
    """
    grid = Grid.parse(grid) if isinstance(grid, str) else grid
    for what, size in (("grid", grid.size), ("plan", plan.size if plan else grid.size)):
        if size != fabric.size:
            raise UsageError(f"the {what} is for {size} processes, and the group has {fabric.size}")
    batch = Batch(0)
    maker = Maker(fabric, batch, seed, statistics, strict, recorder)
    graph = graph or traced(model, whole)
    sizes = sizes or layer_sizes(model)
    assignment = assign(model, graph, grid, plan, maker, whole)
    mover = Mover(fabric, batch)
    forward = Forward(graph, assignment.layers, mover, Rules(mover, seed, recorder))
    found = ParallelModel(model, main_grid(plan, grid), mover, forward, assignment.summed_over(fabric.rank), maker.left_whole)
    found.sizes = sizes
    return found


def layer_sizes(model: nn.Module) -> dict[str, int]:
    """The parameters of each layer that has any of its own."""
    return {
        layer: numel
        for layer, module in model.named_modules()
        if (numel := sum(parameter.numel() for parameter in module.parameters(recurse=False)))
    }


class ParallelModel(nn.Module):
    """A divided model. Made by `parallelize`. Set ``batch.size`` and ``batch.step`` before a forward."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        mover: Mover,
        forward: Forward,
        summed_over: Mapping[str, tuple[int, ...]],
        left_whole: Mapping[str, str],
    ) -> None:
        """Not to be called from outside."""
        super().__init__()
        self.training = model.training
        self.grid = grid
        """The grid whose columns say which samples a process is given."""
        self.fabric, self.batch = mover.fabric, mover.batch
        self.left_whole = left_whole
        """Layers that could not be divided as planned, and why."""
        self.output_samples: Literal["columns", "all"] = "columns"
        """Whether the last output is of the column's samples, or of this process's own share of them."""
        self.sizes: Mapping[str, int] = {}
        """Parameters of each layer of the whole, undivided model, by the layer's name."""
        self.keeps_divided = False
        """Whether a forward in training returns a `Spread`, where the last layer has left its outputs divided over the rows."""
        self._mover, self._forward = mover, forward
        self._summed_over = dict(summed_over)
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)

    def samples(self, batch: int) -> Range:
        """Which of ``batch`` samples this process is to be given: those of its column."""
        return Placement(self.grid).samples_of(batch, self.fabric.rank)

    def output_range(self) -> slice:
        """Which of the samples that this process was given the last output is of."""
        start, _ = self.samples(self.batch.size)
        first, last = Placement(self.grid, self.output_samples).samples_of(self.batch.size, self.fabric.rank)
        return slice(first - start, last - start)

    def shards_by_name(self) -> dict[str, Shard]:
        """How each parameter and buffer is divided, by its name."""
        return shards_of(self, self.grid, self.fabric.rank, self._summed_over)

    def whole_state(self) -> dict[str, Tensor]:
        """The ordinary model's state dict. All processes of a column must call it."""
        return gather_state(self.state_dict(), self.shards_by_name(), self.fabric)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The samples of this process's column (`samples`) to the output for them, or for its share of them (`output_range`).

        Tensors have samples along their first dimension. Raises `UsageError` where there are more or fewer than due.
        """
        size = self.batch.size
        if not size:
            raise UsageError("set batch.size of the divided model to the samples of the whole group before a forward")
        start, stop = self.samples(size)
        inputs = self._forward.positional(inputs, named)
        for each in inputs:
            if isinstance(each, Tensor) and each.dim() and each.shape[0] != stop - start:
                raise UsageError(
                    f"rank {self.fabric.rank} was given {each.shape[0]} samples; of a batch of {size} its column has {stop - start}"
                )
        output = self._forward.run(self, inputs, Placement(self.grid))
        if self.keeps_divided and self.training and isinstance(output, Spread) and output.divided is not None:
            self.output_samples = "columns"
            return output
        return map_values(output, self._given_out)

    def whole(self, output: Spread) -> Tensor:
        """What a forward has returned divided, brought together."""
        return self._mover.whole(output, "output").local

    def _given_out(self, value: Any) -> Any:
        if not isinstance(value, Spread):
            return value
        if value.placement.divided is not None or value.placement.grid != self.grid:
            value = self._mover.whole(self._mover.whole(value, "output"), "output", self.grid)
        self.output_samples = value.placement.samples
        return value.local

    def extra_repr(self) -> str:
        return f"grid {self.grid}, rank {self.fabric.rank}"
