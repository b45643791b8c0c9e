"""Parameters are cut for a grid and gathered from it, and gradients are summed over those who contribute."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.by_hand import redistribute, shards_of
from tests.parallel.model_world import GRIDS, grids, momentum, random, randomised
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.shard import Shard, gather_state, gathered, one_range
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import ThreadFabric, run_ranks


@given(st.data(), st.tuples(*[st.integers(1, 6)] * 3), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_parts_join_to_the_whole(data: st.DataObject, shape: tuple[int, ...], rows: int, dimension: int, several: int) -> None:
    """Also where a row holds several ranges, as of packed weights, or none."""
    length = shape[dimension]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    begin = 0
    for _ in range(several):
        for held in pieces:
            stop = data.draw(st.integers(begin, length))
            held.append((begin, stop))
            begin = stop
    pieces[-1].append((begin, length))
    shard = Shard("fc", shape, tuple(range(rows)), (0,), dimension, tuple(tuple(held) for held in pieces))
    whole = random(*shape)
    parts = [shard.cut(whole, row) for row in range(rows)]
    assert [tuple(each.shape) for each in parts] == [shard.local_shape(row) for row in range(rows)]
    assert torch.equal(shard.join(parts), whole)


def test_a_cut_is_a_copy() -> None:
    whole = random(4, 2)
    for shard in (Shard("fc", (4, 2), (0,), (0,)), Shard("fc", (4, 2), (0,), (0,), 0, one_range(((0, 4),)))):
        part = shard.cut(whole, 0)
        part += 1
        assert not torch.equal(part, whole)


def network() -> nn.Sequential:
    """A model that is batch parallel, then model parallel, then whole."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 2 * 2, 7), nn.Tanh(), nn.Linear(7, 3))


def divided(model: nn.Sequential, grid: Grid, fabric: ThreadFabric) -> nn.Sequential:
    model[3] = Linear(model[3], Site("3", grid, fabric))  # type: ignore[arg-type]
    return model


def run(model: nn.Sequential, x: Tensor, grid: Grid, fabric: ThreadFabric) -> Tensor:
    """The convolution on this process's own samples, everything after it on the column's."""
    own, column, shape = Placement(grid, "all"), Placement(grid), (x.shape[0], 16)
    start, stop = own.samples_of(x.shape[0], fabric.rank)
    features = model[2](model[1](model[0](x[start:stop])))
    output = redistribute(features, own, column, shape, fabric, "3")
    for layer in list(model)[3:]:
        output = layer(output)
    return output


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_model_of_several_kinds_trains_like_the_plain_one(grid: Grid) -> None:
    """Whose gradients are summed over all, whose over the row, and whose parts are: each as its shard says."""
    original, x, weight = randomised(network()), random(7, 2, 4, 4), random(7, 3, seed=5)
    plain = copy.deepcopy(original)
    optimizer = momentum(list(plain.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        (plain(x) * weight).sum().backward()
        optimizer.step()

    def rank(fabric: ThreadFabric) -> dict[str, Tensor]:
        model = divided(copy.deepcopy(original), grid, fabric)  # type: ignore[arg-type]
        shards = shards_of(model, grid, fabric.rank, {"0": tuple(range(grid.size))})
        start, stop = Placement(grid).samples_of(7, fabric.rank)
        optimizer = momentum(list(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            (run(model, x, grid, fabric) * weight[start:stop]).sum().backward()
            sum_gradients(model, fabric, shards)
            optimizer.step()
        return gather_state(model.state_dict(), shards, fabric)

    states, world = run_ranks(grid.size, rank)
    for state in states:
        for name, tensor in plain.state_dict().items():
            close(state[name], tensor, name)
    labels = {label for label in world.traffic[0].messages if label.term == "dw"}
    assert labels <= {Label(layer, "dw", "backward") for layer in "035"}
    assert (Label("0", "dw", "backward") in labels) == (grid.size > 1)
    assert (Label("3", "dw", "backward") in labels) == (grid.columns > 1)
    assert (Label("5", "dw", "backward") in labels) == (grid.size > 1)  # whole: all sum their shares of it


@pytest.mark.parametrize("to", [0, 3])
def test_one_rank_alone_is_given_the_whole_tensors(to: int) -> None:
    """Of a grid of two columns: the other column has no part in it."""
    original, grid = randomised(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))), Grid(2, 2)

    def rank(fabric: ThreadFabric) -> dict[str, Tensor]:
        model = copy.deepcopy(original)
        model[0] = Linear(model[0], Site("0", grid, fabric))  # type: ignore[index,arg-type,operator]
        return dict(gathered(model.state_dict(), shards_of(model, grid, fabric.rank), fabric, to=to))

    states, world = run_ranks(grid.size, rank)
    for each, state in enumerate(states):
        assert list(state) == (list(original.state_dict()) if each == to else [])
    for name, tensor in original.state_dict().items():
        assert torch.equal(states[to][name], tensor)
    assert [bool(traffic.messages) for traffic in world.traffic] == [each != to and each // 2 == to // 2 for each in range(4)]


@given(grids, grids)
@settings(max_examples=20)
def test_a_state_moves_between_grids(before: Grid, after: Grid) -> None:
    """Gathered from one grid and cut for another, also 1x1: nobody sees a difference."""
    original = randomised(nn.Sequential(nn.Conv2d(3, 6, 2), nn.BatchNorm2d(6), nn.Linear(5, 7)))

    def rank(fabric: ThreadFabric, grid: Grid, state: dict[str, Tensor]) -> dict[str, Tensor]:
        empty = copy.deepcopy(original)
        for parameter in empty.parameters():
            parameter.data.zero_()
        empty[0] = Convolution(empty[0], Site("0", grid, fabric))  # type: ignore[index,arg-type,operator]
        empty[2] = Linear(empty[2], Site("2", grid, fabric))  # type: ignore[index,arg-type,operator]
        shards = shards_of(empty, grid, fabric.rank)
        row, _ = grid.place(fabric.rank)
        empty.load_state_dict({name: shards[name].cut(whole, row) for name, whole in state.items()})
        return gather_state(empty.state_dict(), shards, fabric)

    state = original.state_dict()
    for grid in (before, after):
        states, _ = run_ranks(grid.size, lambda fabric, grid=grid, state=state: rank(fabric, grid, state))  # type: ignore[misc]
        for found in states:
            assert list(found) == list(original.state_dict())
            assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())
        state = states[-1]


def test_a_parameter_without_a_gradient_receives_that_of_others_and_a_frozen_one_none() -> None:
    def rank(fabric: ThreadFabric) -> tuple[Tensor | None, Tensor | None]:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        if fabric.rank == 1:
            model.weight.grad = torch.ones(2, 2)
        sum_gradients(model, fabric, shards_of(model, Grid(1, 3), fabric.rank))
        return model.weight.grad, model.bias.grad

    results, _ = run_ranks(3, rank)
    assert all(weight is not None and torch.equal(weight, torch.ones(2, 2)) and bias is None for weight, bias in results)


def test_shared_parameters_are_summed_once() -> None:
    def rank(fabric: ThreadFabric) -> Tensor:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        sum_gradients(model, fabric, shards_of(model, Grid(1, 2), fabric.rank))
        return model[1].weight.grad  # type: ignore[return-value]

    results, _ = run_ranks(2, rank)
    assert all(torch.equal(each, torch.full((2, 2), 2.0)) for each in results)


def test_the_nearest_module_says_over_whom_to_sum() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    shards = shards_of(model, Grid(2, 2), 3, {"0": (0, 1, 2, 3), "0.1": (3,)})
    assert {name: shard.summed_over for name, shard in shards.items() if name.endswith("weight")} == {
        "0.0.weight": (0, 1, 2, 3),
        "0.1.weight": (3,),
        "1.weight": (1, 3),
    }
    assert shards["1.bias"].members == (2, 3)
    assert set(shards_of(model, Grid(2, 2), 3, {"": (0, 1, 2, 3)})) == set(model.state_dict())


def test_a_copy_of_a_divided_model_has_weights_of_its_own_and_the_same_connections() -> None:
    def rank(fabric: ThreadFabric) -> bool:
        layer = Linear(nn.Linear(3, 4), Site("0", Grid(2, 1), fabric))
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight += 1
        return other.site is layer.site and bool((other.weight != layer.weight).all()) and other(torch.ones(2, 3)).shape == (2, 4)

    assert run_ranks(2, rank)[0] == [True, True]


def test_a_tensor_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"layer fc: a tensor of shape \(3, 3\) where the whole one has \(3, 2\)"):
        Shard("fc", (3, 2), (0,), (0,)).cut(torch.zeros(3, 3), 0)
