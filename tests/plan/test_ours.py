"""What our own runtime sends: against the schedules of the collectives, and against the counts of ranks in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.plan.networks import alexnet, conv, linear
from zmqtrain.collectives.schedule import (
    Step,
    bruck_all_gather,
    doubling_all_reduce,
    halving_all_reduce,
    ring_all_gather,
    ring_all_reduce,
)
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan import collective
from zmqtrain.plan.collective import Sent, all_gather, all_reduce
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.layers import LayerShape, stages
from zmqtrain.plan.link import LayerCost, Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Placed
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
@pytest.mark.parametrize("size", SIZES)
def test_rings_send_what_is_counted(numel: int, size: int) -> None:
    assert all_reduce(numel, size, 4, ring=True) == busiest(ring_all_reduce, numel, size)
    assert all_gather(numel, size, 4, ring=True) == busiest(ring_all_gather, numel, size)


@pytest.mark.parametrize("size", SIZES)
def test_other_algorithms_too(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an element a rank, as they cut what is no multiple of the ranks elsewhere."""
    for numel in (2520, 1001):
        for name, schedule in (("halving", halving_all_reduce), ("doubling", doubling_all_reduce)):
            monkeypatch.setattr(collective, "choose_all_reduce", lambda *_, name=name: name)
            found, expected = all_reduce(numel, size, 4), busiest(schedule, numel, size)
            assert found.messages == expected.messages
            assert found.numel == pytest.approx(expected.numel, abs=size)
        monkeypatch.setattr(collective, "choose_all_gather", lambda *_: "bruck")
        found, expected = all_gather(numel, size, 4), busiest(bruck_all_gather, numel, size)
        assert found.messages == expected.messages
        assert found.numel == pytest.approx(expected.numel, abs=size)


def test_one_rank_and_nothing_to_send() -> None:
    assert all_reduce(100, 1, 4) == all_gather(100, 1, 4) == all_reduce(0, 4, 4) == Sent(0, 0)


def test_a_model_parallel_layer_sends_what_ranks_in_threads_count() -> None:
    """The same collectives by hand: 2x2, a linear layer of 12 x 8, 6 samples."""
    grid, label = Grid(2, 2), Label
    stage = stages([linear("fc", 12, 8)])[0]
    cost = Ours(rings=True).layer(stage, Placed("model", grid), 6, first=False)

    def step(fabric: ThreadFabric) -> None:
        column, row = fabric.among(grid.column(fabric.rank)), fabric.among(grid.row(fabric.rank))
        column.all_gather(torch.zeros(3, 4), [(3, 4), (3, 4)], label("fc", "all_gather")).wait()
        column.all_reduce(torch.zeros(3, 12), label("fc", "dx", "backward")).wait()
        row.all_reduce(torch.zeros(4, 12), label("fc", "dw", "backward")).wait()

    _, world = run_ranks(4, step)
    for term in ("all_gather", "dx", "dw"):
        counted = [
            (sum(n for label, n in traffic.messages.items() if label.term == term),
             sum(n for label, n in traffic.nbytes.items() if label.term == term))
            for traffic in world.traffic
        ]  # fmt: skip
        priced = cost.terms()[term]  # type: ignore[index]
        assert max(counted) == (priced.messages, priced.nbytes)


def test_halos_are_k_minus_s_rows_and_none_backward_at_the_first_layer() -> None:
    first = LayerShape("c", "conv", (3, 227, 227), (96, 55, 55), 1, kernel=(11, 11), stride=(4, 4))
    pool = LayerShape("p", "pool", (96, 55, 55), (96, 27, 27), kernel=(3, 3), stride=(2, 2))
    stage = stages([first, pool])[0]
    strips = Placed("domain", Grid(4, 2))
    cost = Ours().layer(stage, strips, 8, first=True)
    assert cost.halo.nbytes == 4 * 4 * (7 * 227 * 3 + 1 * 55 * 96)
    assert cost.halo_back.nbytes == 4 * 4 * 55 * 96  # the pool's
    assert cost.halo.messages == 2  # unpadded: all rows come from below
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


def test_hosts_add_up_first_and_share_their_card() -> None:
    """8 processes on 2 hosts: a slice of a quarter each, between 2 hosts; a card carries all four."""
    stage = alexnet()[5]
    cost = Ours(per_host=4).layer(stage, Placed("batch", Grid(1, 8)), 64, first=False).dw
    assert cost.nbytes == 4 * stage.weights / 4
    assert cost.card_bytes == 4 * stage.weights
    rows = Ours(per_host=4).layer(stage, Placed("model", Grid(2, 4)), 64, first=False)
    assert rows.dw.nbytes == 0  # a row is on one host
    assert rows.all_gather.card_bytes == 4 * rows.all_gather.nbytes  # four columns at once


def test_recurrent_layers_send_a_message_a_position() -> None:
    layer = LayerShape("lstm", "recurrent", (64, 32), (64, 32), 4 * 32 * 64, rounds=64)
    once = LayerShape("lstm", "recurrent", (64, 32), (64, 32), 4 * 32 * 64)
    many, one = (
        Ours(rings=True).layer(stages([each])[0], Placed("model", Grid(2, 1)), 8, first=False).all_gather for each in (layer, once)
    )
    assert many.messages == 64 * one.messages
    assert many.nbytes == one.nbytes


def test_both_pricings_agree_on_volume_where_rings_are_even() -> None:
    for placed in (Placed("model", Grid(4, 4)), Placed("batch", Grid(1, 16))):
        ours, paper = (
            sum((by.layer(stage, placed, 64, first=index == 0) for index, stage in enumerate(alexnet())), LayerCost()).total
            for by in (Ours(rings=True), Paper())
        )
        assert ours.nbytes == pytest.approx(paper.nbytes)
        assert ours.messages > paper.messages
