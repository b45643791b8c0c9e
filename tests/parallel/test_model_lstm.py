"""An LSTM by hidden units on every grid."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.model_world import GRIDS, compare, grids, part, random, randomised
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.dropout import Batch, Masks
from zmqtrain.parallel.model.lstm import LSTM
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks


def everything(module: nn.Module, x: Tensor) -> Tensor:
    """All that an LSTM returns, along the dimension of time: the samples are in dimension 1."""
    output, (hidden, cells) = module(x)
    output = output.transpose(0, 1) if module.batch_first else output
    directions = 2 if module.bidirectional else 1
    by_direction = output.unflatten(-1, (directions, -1)).permute(2, 0, 1, 3).flatten(0, 1)
    return torch.cat([by_direction, hidden, cells])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_every_grid(grid: Grid, dtype: torch.dtype) -> None:
    placement = Placement(grid, sample_dimension=1)
    compare(
        randomised(nn.LSTM(3, 5, num_layers=2), dtype),
        LSTM,
        random(4, 5, 3, dtype=dtype),
        grid,
        source=placement,
        target=placement,
        call=everything,
    )


@given(grids, st.integers(1, 6), st.integers(4, 6), st.integers(1, 3), st.integers(1, 2), *[st.booleans() for _ in range(4)])
@settings(max_examples=15)
def test_any_kind(
    grid: Grid, batch: int, hidden: int, times: int, layers: int, bias: bool, batch_first: bool, both: bool, first: bool
) -> None:
    original = nn.LSTM(3, hidden, num_layers=layers, bias=bias, batch_first=batch_first, bidirectional=both)
    compare(
        randomised(original),
        LSTM,
        random(*((batch, times) if batch_first else (times, batch)), 3),
        grid,
        source=Placement(grid, sample_dimension=0 if batch_first else 1),
        target=Placement(grid, sample_dimension=1),
        input_gradient=not first,
        call=everything,
    )


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2), Grid(3, 1)], ids=str)
def test_first_outputs_and_cells_that_the_caller_gives_get_gradients(grid: Grid) -> None:
    original = randomised(nn.LSTM(3, 5, num_layers=2, bidirectional=True))
    placement = Placement(grid, sample_dimension=1)
    x, hidden, cells = random(3, 5, 3), random(4, 5, 5, seed=1), random(4, 5, 5, seed=2)

    def gradients(module: nn.Module, *given: Tensor) -> list[Tensor]:
        x, *states = (each.clone().requires_grad_() for each in given)
        everything(lambda_of(module, states), x).square().sum().backward()
        return [each.grad for each in (x, *states) if each.grad is not None]

    due = gradients(original, x, hidden, cells)

    def rank(fabric: ThreadFabric) -> list[Tensor]:
        layer = LSTM(original, Site("layer", grid, fabric))  # type: ignore[arg-type]
        return gradients(layer, *(part(each, placement, fabric.rank) for each in (x, hidden, cells)))

    results, _ = run_ranks(grid.size, rank)
    for number, found in enumerate(results):
        assert len(found) == 3
        for one, other in zip(found, due, strict=True):
            close(one, part(other, placement, number), "gradient")


def lambda_of(module: nn.Module, states: list[Tensor]) -> nn.Module:
    """The module with its first outputs and cells given."""

    class Given(nn.Module):
        batch_first, bidirectional = module.batch_first, module.bidirectional

        def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            result: tuple[Tensor, tuple[Tensor, Tensor]] = module(x, (states[0], states[1]))
            return result

    return Given()


def test_a_time_step_is_one_all_gather_and_backward_one_reduce_scatter() -> None:
    grid, times, samples, hidden = Grid(4, 1), 6, 3, 8
    layer = randomised(nn.LSTM(2, hidden))
    placement = Placement(grid, sample_dimension=1)
    world = compare(
        layer, LSTM, random(times, samples, 2), grid, source=placement, target=placement, call=everything, input_gradient=False
    )
    traffic, step = world.traffic[0], samples * hidden * 8 * 3 // 4
    assert traffic.messages[Label("layer", "all_gather")] == 3 * times * 3
    assert traffic.nbytes[Label("layer", "all_gather")] == 3 * (times + 1) * step, "the last one with the cells"
    assert traffic.messages[Label("layer", "dx", "backward")] == 3 * (times - 1) * 3
    assert traffic.nbytes[Label("layer", "dx", "backward")] == 3 * (times - 1) * step


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2), Grid(1, 3), Grid(3, 2)], ids=str)
@pytest.mark.parametrize("both", [False, True])
def test_dropout_between_layers_is_that_of_one_process(grid: Grid, both: bool) -> None:
    original = randomised(nn.LSTM(3, 5, num_layers=3, dropout=0.4, bidirectional=both))
    x = random(3, 5, 3)

    def found(grid: Grid) -> list[tuple[Tensor, Tensor]]:
        placement, batch = Placement(grid, sample_dimension=1), Batch(5)

        def rank(fabric: ThreadFabric) -> tuple[Tensor, Tensor]:
            site = Site("layer", grid, fabric)
            layer = LSTM(copy.deepcopy(original), site, masks=Masks(site, batch, 0))  # type: ignore[arg-type]
            here = part(x, placement, fabric.rank).requires_grad_()
            output = everything(layer, here)
            output.square().sum().backward()
            assert here.grad is not None
            return output.detach(), here.grad

        return run_ranks(grid.size, rank)[0]

    ((alone, back_alone),) = found(Grid(1, 1))
    assert not torch.allclose(alone, everything(copy.deepcopy(original).eval(), x))
    for rank, (output, back) in enumerate(found(grid)):
        close(output, part(alone, Placement(grid, sample_dimension=1), rank), "output")
        close(back, part(back_alone, Placement(grid, sample_dimension=1), rank), "dX")


def test_the_gradient_of_dropout_between_layers() -> None:
    """Against differences: what is dropped of the next layer's input has no gradient either."""
    original = randomised(nn.LSTM(2, 3, num_layers=2, dropout=0.5))
    site = Site("layer", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0))

    def output(x: Tensor) -> Tensor:
        return everything(LSTM(original, site, masks=Masks(site, Batch(2), 0)), x)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(output, random(2, 2, 2).requires_grad_())


def test_bad_input() -> None:
    site = Site("rnn", Grid(4, 1), ThreadFabric(ThreadWorld(4), 0))
    with pytest.raises(UsageError, match="rnn has 3 hidden units, which cannot be divided over 4 rows"):
        LSTM(nn.LSTM(2, 3), site)
    with pytest.raises(UsageError, match="projections"):
        LSTM(nn.LSTM(2, 8, proj_size=4), site)
    with pytest.raises(UsageError, match="its masks must be given"):
        LSTM(nn.LSTM(2, 8, num_layers=2, dropout=0.5), site)
    alone = LSTM(nn.LSTM(2, 8), Site("rnn", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0)))
    with pytest.raises(UsageError, match="needs a tensor of time, samples and features"):
        alone(torch.zeros(4, 2))
