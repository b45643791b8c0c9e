"""A divided layer beside the plain one: the same numbers, and the messages that were predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.by_hand import shards_of
from tests.precision import close, exactly, judge_of
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Sent, Traffic, total
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.shard import gather_state
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks

STEPS = 3
#: Of at most 8 processes.
GRIDS = [Grid(rows, columns) for rows in range(1, 5) for columns in range(1, 5) if rows * columns <= 8]
grids = st.sampled_from(GRIDS)

Call = Callable[[nn.Module, Tensor], Tensor]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that depend on the shape and the seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomised(module: nn.Module, dtype: torch.dtype = torch.float64, scale: float = 0.5) -> nn.Module:
    """Asymmetric weights everywhere, also where a layer begins with zeros or ones."""
    module.to(dtype)
    for number, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=100 + number) * scale)
    return module


def part(whole: Tensor, placement: Placement, rank: int) -> Tensor:
    """What a rank holds."""
    return whole[tuple(slice(*each) for each in placement.block(tuple(whole.shape), rank))].clone()


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.02, momentum=0.9)


@dataclass(slots=True)
class Run:
    """What came out of a few steps, by step."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    predicted: Traffic = field(default_factory=dict)


def steps(module: nn.Module, x: Tensor, weight_of: Callable[[Tensor], Tensor], needs: bool, call: Call, meet: Any) -> Run:
    """A few steps of SGD with momentum, from inputs that change from one to the next."""
    parameters = list(module.parameters())
    run, optimizer = Run(), momentum(parameters) if parameters else None
    for step in range(STEPS):
        given = (x * (1 + step / 8) if x.is_floating_point() else x).detach().clone().requires_grad_(needs)
        module.zero_grad(set_to_none=True)
        output = call(module, given)
        (output * weight_of(output)).sum().backward()
        meet(module)
        run.outputs.append(output.detach().clone())
        run.inputs.append(given.grad)
        run.gradients.append({name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None})
        if optimizer is not None:
            optimizer.step()
    run.state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return run


def compare(
    original: nn.Module,
    divide: Callable[[Any, Site], nn.Module],
    x: Tensor,
    grid: Grid,
    *,
    source: Placement | None = None,
    target: Placement | None = None,
    input_gradient: bool = True,
    call: Call = lambda module, x: module(x),
    plain: Call | None = None,
    predict: Callable[[nn.Module, tuple[int, ...], int, bool], Traffic] | None = None,
) -> ThreadWorld:
    """``divide(original, site)`` on every rank of a grid against the original on the whole batch: outputs, dX, dW, db, weights
    after some steps, buffers, and the messages and bytes of each label, which must be those that the layer predicts.
    """
    source, target = source or Placement(grid), target or Placement(grid)
    output = (plain or call)(copy.deepcopy(original), x)
    weight = random(*output.shape, seed=77, dtype=output.dtype)
    due = steps(copy.deepcopy(original), x, lambda _: weight, input_gradient, plain or call, lambda _: None)
    exact = steps(judge_of(original), exactly(x), lambda _: exactly(weight), input_gradient, plain or call, lambda _: None)

    def rank(fabric: ThreadFabric) -> tuple[Run, dict[str, Tensor]]:
        layer = divide(copy.deepcopy(original), Site("layer", grid, fabric))
        shards = shards_of(layer, grid, fabric.rank)
        here = part(x, source, fabric.rank)
        run = steps(
            layer,
            here,
            lambda output: part(weight, target, fabric.rank),
            input_gradient,
            call,
            lambda module: sum_gradients(module, fabric, shards),
        )
        predicted = _predicted(layer, tuple(here.shape), weight.element_size(), input_gradient, predict)
        run.predicted = {label: sent * STEPS for label, sent in predicted.items()}
        for step, found in enumerate(run.gradients):
            # A gradient that is zero but for rounding, as that of the keys' bias, is compared with the others.
            largest = max((float(each.abs().max()) for each in due.gradients[step].values()), default=0.0)
            for name, gradient in found.items():
                one, judge = (shards[name].cut(each.gradients[step][name], grid.place(fabric.rank)[0]) for each in (due, exact))
                close(gradient, one, f"gradient of {name}", exact=judge, least=largest / 1e3)
        counted = {
            label: Sent(count, fabric.traffic.nbytes[label])
            for label, count in fabric.traffic.messages.items()
            if label.term != "dw"
        }
        assert counted == run.predicted, f"rank {fabric.rank} of {grid}: sent {counted}, predicted {run.predicted}"
        return run, gather_state(layer.state_dict(), shards, fabric)

    results, world = run_ranks(grid.size, rank)
    for number, (run, state) in enumerate(results):
        assert list(state) == list(due.state), "the names of the original"
        for name, tensor in state.items():
            close(tensor, due.state[name], f"{name} after {STEPS} steps", exact=exactly(exact.state[name]))
        for step in range(STEPS):
            what = f"of rank {number} at step {step}"
            one, judge = due.outputs[step], exact.outputs[step]
            found, largest = run.outputs[step], float(judge.abs().max())
            close(found, part(one, target, number), f"output {what}", exact=part(judge, target, number), least=largest)
            back, back_due, back_exact = run.inputs[step], due.inputs[step], exact.inputs[step]
            assert (back is None) == (back_due is None)
            if back is not None and back_due is not None and back_exact is not None:
                largest, judge = float(back_exact.abs().max()), part(back_exact, source, number)
                close(back, part(back_due, source, number), f"dX {what}", exact=judge, least=largest)
    return world


def _predicted(
    layer: nn.Module,
    shape: tuple[int, ...],
    itemsize: int,
    input_gradient: bool,
    predict: Callable[[nn.Module, tuple[int, ...], int, bool], Traffic] | None,
) -> Traffic:
    if predict is not None:
        return total([predict(layer, shape, itemsize, input_gradient)])
    assert isinstance(layer, Divided)
    return layer.traffic(shape, itemsize, input_gradient=input_gradient)
