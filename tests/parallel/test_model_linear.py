"""Linear layers on every grid: numbers of the plain layer, and no more communication than the paper counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.model_world import GRIDS, compare, grids, random, randomised
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks

FORWARD, BACKWARD = Label("layer", "all_gather"), Label("layer", "dx", "backward")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_by_outputs_on_every_grid(grid: Grid, dtype: torch.dtype) -> None:
    original = randomised(nn.Linear(5, 7), dtype)
    compare(original, lambda layer, site: Linear(layer, site), random(6, 5, dtype=dtype), grid)


@given(st.data(), grids, st.integers(1, 9), st.integers(4, 11), st.integers(1, 9), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_by_outputs_of_any_size(
    data: st.DataObject, grid: Grid, batch: int, outputs: int, inputs: int, bias: bool, first: bool
) -> None:
    """Features that the rows do not divide, batches that the columns do not divide or that are too small for them."""
    original = randomised(nn.Linear(inputs, outputs, bias=bias))
    shape = (batch, *data.draw(st.sampled_from([(), (3,), (2, 2)])), inputs)
    compare(original, lambda layer, site: Linear(layer, site), random(*shape), grid, input_gradient=not first)


@given(st.data(), grids, st.integers(1, 9), st.integers(4, 9), st.integers(4, 9))
@settings(max_examples=25)
def test_divided_outputs_and_inputs(data: st.DataObject, grid: Grid, batch: int, outputs: int, inputs: int) -> None:
    """An input that comes divided is gathered here, and its gradient only reduce-scattered; an output may stay divided."""
    original = randomised(nn.Linear(inputs, outputs))
    source = Placement.over_rows(grid, -1, inputs)
    gather = data.draw(st.booleans())
    compare(
        original,
        lambda layer, site: Linear(layer, site, gather=gather, gathers=source.divisions),
        random(batch, 2, inputs),
        grid,
        source=source,
        target=Placement(grid) if gather else Placement.over_rows(grid, -1, outputs),
    )


@given(grids, st.integers(1, 9), st.integers(1, 9), st.integers(4, 9), st.booleans())
@settings(max_examples=25)
def test_by_inputs(grid: Grid, batch: int, outputs: int, inputs: int, bias: bool) -> None:
    original = randomised(nn.Linear(inputs, outputs, bias=bias))
    source = Placement.over_rows(grid, 1, inputs)
    compare(original, lambda layer, site: Linear(layer, site, input_divided=True), random(batch, inputs), grid, source=source)


class Pair(nn.Module):
    """The MLP of a transformer."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_pair_costs_one_sum_in_forward_and_one_in_backward(grid: Grid) -> None:
    world = compare(
        randomised(Pair(nn.Linear(5, 9), nn.Linear(9, 6))),
        lambda pair, site: Pair(
            Linear(pair.first, site.child("first"), gather=False), Linear(pair.second, site.child("second"), input_divided=True)
        ),
        random(6, 5),
        grid,
        predict=lambda pair, shape, itemsize, _: pair.first.traffic(shape, itemsize) | pair.second.traffic((shape[0], 9), itemsize),
    )
    if grid.rows > 1:
        assert {label for label in world.traffic[0].messages if label.term in ("all_gather", "dx")} == {
            Label("layer.second", "all_gather"),
            Label("layer.first", "dx", "backward"),
        }


def test_the_volume_is_that_of_the_paper() -> None:
    """Eq. 8: forward (Pr - 1) / Pr of the column's outputs, backward 2 (Pr - 1) / Pr of its inputs; a first layer's nothing."""
    grid = Grid(4, 2)

    def sent(first: bool, gathers: bool = False) -> dict[Label, int]:
        source = Placement.over_rows(grid, -1, 400) if gathers else Placement(grid)
        world = compare(
            randomised(nn.Linear(400, 8)),
            lambda layer, site: Linear(layer, site, gathers=source.divisions if gathers else None),
            random(200, 400),
            grid,
            source=source,
            input_gradient=not first,
        )
        return {label: count // 3 for label, count in world.traffic[0].nbytes.items() if label.term in ("all_gather", "dx")}

    samples = 200 // 2  # enough for an all-reduce of the least volume
    assert sent(first=False) == {FORWARD: samples * 8 * 8 * 3 // 4, BACKWARD: 2 * samples * 400 * 8 * 3 // 4}
    assert sent(first=True) == {FORWARD: samples * 8 * 8 * 3 // 4}
    both = samples * (8 + 400) * 8 * 3 // 4
    assert sent(first=False, gathers=True) == {FORWARD: both, BACKWARD: samples * 400 * 8 * 3 // 4}


def test_communication_of_backward_begins_before_the_gradients_of_the_weights() -> None:
    """The sum of dX is on its way while dW is computed, and waited for after it."""
    order: list[str] = []

    def rank(fabric: ThreadFabric) -> None:
        layer = Linear(randomised(nn.Linear(4, 4)), Site("layer", Grid(2, 1), fabric))  # type: ignore[arg-type]
        if fabric.rank == 0:
            watch(layer, fabric, order)
        layer(random(3, 4).requires_grad_()).sum().backward()

    run_ranks(2, rank)
    assert order == ["begin", "dW", "db", "wait"]


def watch(layer: Linear, fabric: ThreadFabric, order: list[str]) -> None:
    """Write down what backward does, in its order."""
    group = fabric.among((0, 1))
    begin = group.all_reduce

    def all_reduce(tensor: torch.Tensor, label: Label):  # type: ignore[no-untyped-def]
        pending = begin(tensor, label)
        wait = pending.wait
        order.append("begin")
        pending.wait = lambda: [order.append("wait"), wait()][1]  # type: ignore[func-returns-value,method-assign]
        return pending

    group.all_reduce = all_reduce  # type: ignore[method-assign]
    operation = layer._operation

    class Watched:
        forward, input_gradient = operation.forward, operation.input_gradient

        def weight_gradient(self, *given: torch.Tensor) -> torch.Tensor:
            order.append("dW")
            return operation.weight_gradient(*given)

        def bias_gradient(self, *given: torch.Tensor) -> torch.Tensor:
            order.append("db")
            return operation.bias_gradient(*given)

    layer._operation = Watched()  # type: ignore[assignment]


def test_autocast_computes_and_sends_in_half_the_bytes() -> None:
    grid, x = Grid(2, 2), random(4, 6, dtype=torch.float32)
    plain = randomised(nn.Linear(6, 4), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        due = plain(x)

    def rank(fabric: ThreadFabric) -> torch.Tensor:
        layer = Linear(plain, Site("layer", grid, fabric))  # type: ignore[arg-type]
        column = fabric.rank // 2
        here = x[2 * column : 2 * column + 2].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output: torch.Tensor = layer(here)
        output.sum().backward()
        assert here.grad is not None
        assert here.grad.dtype == layer.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
        predicted = layer.traffic((2, 6), 2)
        assert {label: fabric.traffic.nbytes[label] for label in predicted} == {
            label: sent.nbytes for label, sent in predicted.items()
        }
        return output.detach()

    results, _ = run_ranks(4, rank)
    for number, found in enumerate(results):
        column = number // 2
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.float(), due[2 * column : 2 * column + 2].float(), rtol=2e-2)


def test_bad_input() -> None:
    site = Site("fc6", Grid(4, 1), ThreadFabric(ThreadWorld(4), 0))
    with pytest.raises(UsageError, match="fc6 has 3 outputs, which cannot be divided over 4 rows"):
        Linear(nn.Linear(5, 3), site)
    with pytest.raises(UsageError, match="fc6 has 3 inputs, which cannot be divided over 4 rows"):
        Linear(nn.Linear(3, 5), site, input_divided=True)
    with pytest.raises(UsageError, match="fc6 has 8 outputs, and the divisions 7"):
        Linear(nn.Linear(5, 8), site, divisions=((0, 1), (1, 2), (2, 3), (3, 7)))
    with pytest.raises(UsageError, match="a row would have no outputs"):
        Linear(nn.Linear(5, 8), site, divisions=((0, 1), (1, 2), (2, 2), (2, 8)))
    with pytest.raises(UsageError, match="takes them divided and gives its outputs whole"):
        Linear(nn.Linear(5, 8), site, input_divided=True, gather=False)
    with pytest.raises(UsageError, match="the grid 2x1 has 2 processes, the group 4"):
        Site("fc6", Grid(2, 1), site.fabric)
