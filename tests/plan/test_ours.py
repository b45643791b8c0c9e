"""What our own runtime sends: against the schedules of the collectives, and against the counts of ranks in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from tests.plan.networks import alexnet, conv, linear
from zmqtrain.collectives import operations
from zmqtrain.collectives.group import bounds
from zmqtrain.collectives.schedule import (
    Step,
    doubling_all_reduce,
    halving_all_reduce,
    ring_all_reduce,
)
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.domain.make import domain_traffic
from zmqtrain.parallel.geometry import even
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model import traffic
from zmqtrain.plan import collective
from zmqtrain.plan.collective import FOLLOWED, Sent, all_reduce, idle, ring
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.layers import LayerShape, stages
from zmqtrain.plan.link import LayerCost, Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem
from zmqtrain.testing.threads import ThreadFabric, run_ranks

SIZES = range(2, 10)
GIGABIT = Link(200e-6, 8e-9, 1 / 20e9)


def busiest(schedule: Callable[[int, int, int], Sequence[Step]], numel: int, size: int) -> Sent:
    """Of the rank that sends most."""
    best = Sent(0, 0)
    for rank in range(size):
        out = [sum(stop - start for start, stop in step.out) for step in schedule(numel, size, rank) if step.to is not None]
        sent = Sent(sum(map(bool, out)), sum(out))
        best = max(best, sent, key=lambda each: (each.numel, each.messages))
    return best


@pytest.mark.parametrize("numel", [2520, 1001])
@pytest.mark.parametrize("size", [*SIZES, 17, 24])
def test_sums_send_what_their_schedules_do(size: int, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many ranks to an element a rank, as halving cuts what is no multiple of the ranks elsewhere."""
    schedules = {"ring": ring_all_reduce, "halving": halving_all_reduce, "doubling": doubling_all_reduce}
    for name, schedule in schedules.items():
        for module in (collective, operations):
            monkeypatch.setattr(module, "choose_all_reduce", lambda *_, name=name: name)
        all_reduce.cache_clear()
        found, expected = all_reduce(numel, size, 4), busiest(schedule, numel, size)
        assert found.messages == expected.messages
        assert found.numel == pytest.approx(expected.numel, abs=0 if size <= FOLLOWED else size)
    all_reduce.cache_clear()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("units", [1, 3, 12, 35])
def test_rings_send_all_parts_but_the_smallest(size: int, units: int) -> None:
    parts = [4 * (stop - start) for start, stop in bounds(units, size)]
    every = [traffic.all_gather(parts, rank) for rank in range(size)]
    assert ring(4 * units, units, size) == Sent(max(each.messages for each in every), max(each.nbytes for each in every))
    scattered = [traffic.reduce_scatter(parts, rank) for rank in range(size)]
    assert max(each.nbytes for each in scattered) == ring(4 * units, units, size).numel


def test_one_rank_and_nothing_to_send() -> None:
    assert all_reduce(100, 1, 4) == ring(100, 10, 1) == all_reduce(0, 4, 4) == ring(0, 10, 4) == Sent(0, 0)


def test_a_model_parallel_layer_sends_what_ranks_in_threads_count() -> None:
    """The same collectives by hand: 2x2, a linear layer of 12 x 8, 6 samples, the last of a model."""
    grid, label = Grid(2, 2), Label
    stage = stages([linear("fc", 12, 8)])[0]
    placed = Placed("model", grid)

    def step(fabric: ThreadFabric, joined: bool) -> None:
        column, row = fabric.among(grid.column(fabric.rank)), fabric.among(grid.row(fabric.rank))
        column.all_gather(torch.zeros(3, 4), [(3, 4), (3, 4)], label("fc", "all_gather")).wait()
        if joined:
            column.all_gather(torch.zeros(3, 6), [(3, 6), (3, 6)], label("fc", "all_gather")).wait()
            column.reduce_scatter([torch.zeros(3, 6)] * 2, label("fc", "dx", "backward")).wait()
        else:
            column.all_reduce(torch.zeros(3, 12), label("fc", "dx", "backward")).wait()
        row.all_reduce(torch.zeros(4, 12), label("fc", "dw", "backward")).wait()

    for joined in (False, True):
        cost = Ours().layer(stage, placed, 6, first=False, last=True, joined=6 * joined)
        _, world = run_ranks(4, partial(step, joined=joined))
        for term in ("all_gather", "dx", "dw"):
            counted = [
                (sum(n for label, n in traffic.messages.items() if label.term == term),
                 sum(n for label, n in traffic.nbytes.items() if label.term == term))
                for traffic in world.traffic
            ]  # fmt: skip
            priced = cost.terms()[term]  # type: ignore[index]
            assert max(counted) == (priced.messages, priced.nbytes)


def test_between_layers_on_one_grid_activations_stay_divided_and_their_gradient_is_scattered() -> None:
    """Half of the paper's sum, and a grid for several layers is the better for it."""
    layers = stages([linear(name, 512, 512) for name in "abc"])
    placed = [Placed("model", Grid(4, 1))] * 3
    ours, paper = (price(Problem(layers, 64, 4, GIGABIT, by), placed) for by in (Ours(), Paper()))
    for index in (1, 2):
        assert ours.layers[index].cost.dx.nbytes == paper.layers[index].cost.dx.nbytes / 2
    assert ours.cost.all_gather.nbytes == paper.cost.all_gather.nbytes
    mixed = price(Problem(layers, 64, 4, GIGABIT, Ours()), [placed[0], Placed("model", Grid(2, 2)), placed[2]])
    assert mixed.layers[1].cost.dx.nbytes == 2 * 4 * 32 * 512 / 2  # whole on its column, and so is its gradient
    assert mixed.layers[1].cost.redistribute.nbytes > 0


def test_halos_are_those_of_the_strips_and_none_backward_at_the_first_layer() -> None:
    """7 rows cross a cut at the first convolution, in both directions, and one at the pool."""
    first = LayerShape("c", "conv", (3, 227, 227), (96, 55, 55), 1, kernel=(11, 11), stride=(4, 4))
    pool = LayerShape("p", "pool", (96, 55, 55), (96, 27, 27), kernel=(3, 3), stride=(2, 2))
    stage = stages([first, pool])[0]
    strips = Placed("domain", Grid(4, 2))
    cost = Ours().layer(stage, strips, 8, first=True)
    convolution = domain_traffic(nn.Conv2d(3, 96, 11, 4), even(227, 4), (4, 3, 227, 227), 4)
    assert convolution.out_division is not None
    pooling = domain_traffic(nn.MaxPool2d(3, 2), convolution.out_division, (4, 96, 55, 55), 4)
    there = [one.nbytes + other.nbytes for one, other in zip(convolution.halo["forward"], pooling.halo["forward"], strict=True)]
    assert cost.halo.nbytes == max(there)
    assert sum(there) == 4 * 4 * 3 * (7 * 227 * 3 + 1 * 55 * 96)  # three cuts
    assert cost.halo_back.nbytes == max(each.nbytes for each in pooling.halo["backward"])
    paper = Paper().layer(stage, strips, 8, first=True)
    assert paper.halo.nbytes == 4 * 4 * 5 * 227 * 3
    inner = stages([conv("x", 8, 8, 32)])[0]
    cost = Ours().layer(inner, strips, 8, first=False)
    assert (cost.halo.messages, cost.halo.nbytes) == (2, 4 * 4 * 2 * 32 * 8)
    assert cost.halo == cost.halo_back
    assert Ours().layer(inner, Placed("domain", Grid(2, 4)), 8, first=False).halo.nbytes == 4 * 2 * 1 * 32 * 8  # one cut
    wide = stages([conv("w", 8, 8, 8, 5)])[0]  # a strip of one row: two rows away is two hops
    assert Ours().layer(wide, Placed("domain", Grid(8, 1)), 1, first=False).halo.messages == 4
    point = stages([conv("1x1", 8, 8, 32, 1)])[0]
    assert Ours().layer(point, strips, 8, first=False).halo.messages == 0


def test_processes_of_one_host_send_nothing() -> None:
    layers = alexnet()
    for placed in (Placed("batch", Grid(1, 4)), Placed("model", Grid(2, 2)), Placed("domain", Grid(4, 1))):
        for stage in layers[:5]:
            cost = Ours(per_host=4).layer(stage, placed, 64, first=False).total
            assert (cost.messages, cost.nbytes) == (0, 0)
            assert 0 < GIGABIT.seconds(cost) < GIGABIT.seconds(Ours().layer(stage, placed, 64, first=False).total)
    assert Ours(per_host=4).layer(layers[5], Placed("batch", Grid(1, 4)), 64, first=False).dw.memory_bytes == 5 * 4 * 37_748_736


def test_hosts_add_up_first_and_share_their_nic() -> None:
    """8 processes on 2 hosts: a slice of a quarter each, between 2 hosts; a NIC carries all four."""
    stage = alexnet()[5]
    cost = Ours(per_host=4).layer(stage, Placed("batch", Grid(1, 8)), 64, first=False).dw
    assert cost.nbytes == 4 * stage.weights / 4
    assert cost.nic_bytes == 4 * stage.weights
    rows = Ours(per_host=4).layer(stage, Placed("model", Grid(2, 4)), 64, first=False, last=True)
    assert rows.dw.nbytes == 0  # a row is on one host
    assert rows.all_gather.nic_bytes == 4 * rows.all_gather.nbytes  # four columns at once


def test_statistics_and_scattered_gradients_go_to_other_hosts() -> None:
    norm = LayerShape("norm", "norm", (8, 4, 4), (8, 4, 4), 16, statistics=True)
    stage = stages([conv("x", 8, 8, 4), norm])[0]
    for placed in (Placed("batch", Grid(1, 4)), Placed("domain", Grid(4, 1))):
        spread, pairs, together = (Ours(per_host=each).layer(stage, placed, 8, first=False) for each in (1, 2, 4))
        assert (spread.statistics.messages, pairs.statistics.messages, together.statistics.messages) == (3, 2, 0)
        assert (spread.statistics.beside, pairs.statistics.beside, together.statistics.beside) == (2, 1, 0)  # all at once
        assert (spread.statistics_back.messages, pairs.statistics_back.messages, together.statistics_back.messages) == (2, 1, 0)
    linear = stages([LayerShape("fc", "linear", (32,), (32,), 32 * 33)])[0]
    spread, pairs = (
        Ours(per_host=each).layer(linear, Placed("model", Grid(4, 1)), 8, first=False, joined=32).dx for each in (1, 2)
    )
    assert spread.nic_bytes == 4 * 8 * 32 * 3 / 4
    assert pairs.nic_bytes == 2 * 4 * 8 * 32 * 2 / 4  # both send half of it


def test_what_is_whole_is_summed_over_all_as_in_training() -> None:
    linear = stages([LayerShape("fc", "linear", (32,), (32,), 32 * 33)])[0]
    for by in (Ours(), Paper()):
        batch = by.layer(linear, Placed("batch", Grid(1, 4)), 8, first=False).dw
        assert batch.messages
        for grid in (Grid(4, 1), Grid(2, 2)):
            assert by.layer(linear, Placed("whole", grid), 8, first=False).dw == batch


def test_recurrent_layers_send_a_message_a_position() -> None:
    layer = LayerShape("lstm", "recurrent", (64, 32), (64, 32), 4 * 32 * 64, rounds=64)
    once = LayerShape("lstm", "recurrent", (64, 32), (64, 32), 4 * 32 * 64)
    many, one = (Ours().layer(stages([each])[0], Placed("model", Grid(2, 1)), 8, first=False).all_gather for each in (layer, once))
    assert many.messages == 64 * one.messages == 64
    assert many.nbytes == 64 * one.nbytes == 4 * 8 * 64 * 32 / 2


def test_both_pricings_agree_on_volume_where_nothing_stays_divided() -> None:
    for placed in (Placed("model", Grid(4, 4)), Placed("batch", Grid(1, 16))):
        ours, paper = (
            sum((by.layer(stage, placed, 64, first=index == 0, last=True) for index, stage in enumerate(alexnet())), LayerCost())
            for by in (Ours(), Paper())
        )
        assert ours.total.nbytes == pytest.approx(paper.total.nbytes, rel=0.01)
        assert ours.total.messages >= paper.total.messages


def test_small_weights_share_the_messages_of_their_bucket() -> None:
    """Of a layer that fills a tenth of a bucket, a tenth of the bucket's all-reduce; a larger one is by itself."""
    small, large = (stages([LayerShape("fc", "linear", (32,), (32,), weights)])[0] for weights in (32 * 32, 1 << 22))
    placed = Placed("batch", Grid(1, 4))
    alone, together = (Ours(bucket_bytes=each).layer(small, placed, 8, first=False).dw for each in (0, 10 * 4 * 32 * 32))
    whole = all_reduce(10 * 32 * 32, 4, 4)
    assert together.messages == whole.messages / 10 < alone.messages
    assert together.nbytes == whole.numel * 4 / 10
    assert Ours(bucket_bytes=1 << 20).layer(large, placed, 8, first=False).dw == Ours().layer(large, placed, 8, first=False).dw


def test_a_loss_that_takes_divided_logits_tells_a_few_numbers_instead() -> None:
    """3 of each of 4 samples, to each of 3 others at once."""
    stage, placed = stages([linear("fc", 32, 64)])[0], Placed("model", Grid(4, 2))
    whole, divided = (Ours().layer(stage, placed, 8, first=False, last=True, told=each) for each in (0, 3))
    assert whole.all_gather.nbytes == 4 * 4 * 64 * 3 / 4
    assert (divided.all_gather.nbytes, divided.statistics.nbytes) == (0, 3 * 3 * 4 * 4)
    assert (divided.statistics.messages, divided.statistics.beside) == (3, 2)


def test_sums_of_activations_wait_for_their_own_pieces() -> None:
    """By halving; a ring streams, and small ones are doubled."""
    assert [idle(1 << 16, size, 4) for size in (1, 2, 3, 4, 8)] == [0, 0, 0, 1 << 14, 1 << 14]
    assert idle(1 << 10, 4, 4) == 0


def test_messages_within_a_host_cost_nothing_of_the_network() -> None:
    layer = LayerShape("a", "attention", (64, 32), (64, 32), 4 * 32 * 32, heads=8, sums=1)
    stage, placed = stages([layer])[0], Placed("model", Grid(8, 1))
    spread, together = (Ours(per_host=each).layer(stage, placed, 64, first=False).all_gather for each in (1, 4))
    assert together.messages < spread.messages
    assert together.nic_bytes > spread.nic_bytes
    strips = Placed("domain", Grid(8, 1))
    inner = stages([conv("x", 8, 8, 32)])[0]
    spread, together = (Ours(per_host=each).layer(inner, strips, 8, first=False).halo for each in (1, 4))
    assert (spread.messages, together.messages) == (2, 1)
