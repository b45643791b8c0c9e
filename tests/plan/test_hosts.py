"""What goes between hosts where a layer's grid is not the one by whose rows processes were put on them: counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from zmqtrain.collectives.choose import choose_all_reduce
from zmqtrain.collectives.schedule import doubling_all_reduce, halving_all_reduce, ring_all_reduce
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan import hosts as hosts_module
from zmqtrain.plan.collective import Sent, all_reduce
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.hosts import Hosts, Members, Moved, Spread
from zmqtrain.plan.layers import LayerShape, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Lie, Placed
from zmqtrain.plan.planner import plan
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, main_grid
from zmqtrain.topology.compute import Compute
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

SCHEDULES = {"ring": ring_all_reduce, "halving": halving_all_reduce, "doubling": doubling_all_reduce}
MEMBERS: tuple[Members, ...] = ("columns", "rows", "all")


def grids(size: int) -> list[Grid]:
    return [Grid(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]


def cases(size: int) -> Iterator[tuple[Hosts, Grid, Members]]:
    for per_host in (2, 3, 4):
        for main in grids(size):
            for grid in grids(size):
                for members in MEMBERS:
                    yield Hosts(per_host, main), grid, members


def groups_of(grid: Grid, members: Members) -> list[tuple[int, ...]]:
    if members == "all":
        return [tuple(range(grid.size))]
    of = grid.column if members == "columns" else grid.row
    return sorted({of(rank) for rank in range(grid.size)})


def where(hosts: Hosts, rank: int) -> int:
    return int(hosts.of(np.array([rank]))[0])


@pytest.mark.parametrize(("slots", "grid"), [(2, "2x2"), (2, "4x1"), (4, "2x4"), (4, "4x2"), (2, "4x2"), (3, "3x2"), (2, "1x4")])
def test_processes_are_where_a_run_puts_them(slots: int, grid: str) -> None:
    main = Grid.parse(grid)
    topology = Topology.model_validate(
        {
            "job": {"name": "where", "task": "work.py:task"},
            "hosts": [{"name": f"host{number}", "slots": slots} for number in range(main.size // slots)],
            "compute": Compute(group_size=main.size, grid=grid, device="cpu"),
            "exchange": {"kind": "allreduce"},
        }
    )
    found = [f"host{where(Hosts(slots, main), rank)}" for rank in range(main.size)]
    assert [role.host for role in place(topology).workers] == found


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_each_figure_is_what_counting_gives(size: int) -> None:
    for hosts, grid, members in cases(size):
        found, groups = hosts.among(grid, members), groups_of(grid, members)
        links, pairs, here, crossing, added = (Counter[int]() for _ in range(5))
        for group in groups:
            there = Counter(where(hosts, rank) for rank in group)
            around = zip(group, (*group[1:], group[0]), strict=True)
            links += Counter(where(hosts, one) for one, other in around if where(hosts, one) != where(hosts, other))
            here += Counter(dict.fromkeys(there, 1))
            for host, number in there.items():
                pairs[host] += number * (len(group) - number)
                crossing[host] += len(there) > 1
                added[host] += number + 1 if number > 1 else 0
        expected = [max(each.values(), default=0) for each in (here, crossing, links, pairs, added)]
        assert [found.groups_here, found.crossing, found.links, found.pairs_away, found.added_here] == expected
        assert found.local == all(len({where(hosts, rank) for rank in group}) == 1 for group in groups)
        assert found.apart == all(len({where(hosts, rank) for rank in group}) == len(group) for group in groups)


@pytest.mark.parametrize("numel", [64, 1 << 14, 1 << 20])
@pytest.mark.parametrize("size", [4, 8])
def test_sums_send_between_hosts_what_their_schedules_do(size: int, numel: int) -> None:
    for hosts, grid, members in cases(size):
        spread, sent, messages = hosts.among(grid, members), Counter[int](), 0
        for group in groups_of(grid, members):
            algorithm = choose_all_reduce(4 * numel, len(group))
            for place_, rank in enumerate(group):
                away = [
                    step
                    for step in (SCHEDULES[algorithm](numel, len(group), place_) if len(group) > 1 else ())
                    if step.to is not None and where(hosts, group[step.to]) != where(hosts, rank)
                ]
                sent[where(hosts, rank)] += sum(stop - start for step in away for start, stop in step.out)
                messages = max(messages, len(away))
        found = spread.all_reduced(numel, 4)
        assert found.numel == pytest.approx(max(sent.values()), rel=1e-3, abs=2 * size)  # parts of a ring differ by an element
        if choose_all_reduce(4 * numel, spread.size) != "ring":  # of which one that passes another host waits for all
            assert found.messages == messages


def test_slices_of_hosts_with_different_numbers_of_a_group() -> None:
    """6 processes on hosts of 4 and 2, all in one group: two slices, each between two hosts."""
    spread = Hosts(4, Grid(1, 6)).among(Grid(1, 6), "all")
    half = all_reduce(500, 2, 4)
    assert spread.added(1000, 4) == (half, 2 * half.numel)
    assert spread.added_here == 5


def test_alone_on_their_hosts_processes_send_all_they_send_between_them() -> None:
    for grid in grids(8):
        for members in MEMBERS:
            found = Hosts(1, Grid(2, 4)).among(grid, members)
            slow = Spread.of(np.array(groups_of(grid, members)), every=True)
            assert [getattr(found, name) for name in ("local", "apart", "links", "hops", "most_away", "pairs_away")] == [
                getattr(slow, name) for name in ("local", "apart", "links", "hops", "most_away", "pairs_away")
            ]
            assert found.all_reduced(4096, 4) == slow.all_reduced(4096, 4)
            assert found.added(4096, 4) == slow.added(4096, 4)


def test_of_many_processes_the_first_host_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "MOST_PROCESSES", 32)
    size = 80  # which no other test has: what is known of a grid is kept
    for main, grid in (
        (Grid(4, size // 4), Grid(4, size // 4)),
        (Grid(4, size // 4), Grid(8, size // 8)),
        (Grid(size, 1), Grid(2, size // 2)),
    ):
        for members in ("columns", "rows"):
            found, groups = Hosts(4, main).among(grid, members), groups_of(grid, members)
            of_hosts = np.stack([Hosts(4, main).of(np.array(group)) for group in groups])
            every = Spread.of(of_hosts, every=True)
            assert (found.groups_here, found.links, found.pairs_away) == (every.groups_here, every.links, every.pairs_away)


@pytest.mark.parametrize(
    ("main", "held", "needed", "expected"),
    [
        # Columns of 2x2 gather their channels: hosts have a process of each, so both links of both rings leave them.
        (Grid(2, 2), Lie(2, 2), Lie(2), Moved(ring=True, messages=1, part=2)),
        # Each column is on a host.
        (Grid(4, 1), Lie(2, 2), Lie(2), Moved(ring=True, messages=0, part=0)),
        # From batch to all samples, a ring of 4: hosts have every other rank, or neighbours.
        (Grid(2, 2), Lie(4), Lie(1), Moved(ring=True, messages=3, part=2)),
        (Grid(4, 1), Lie(4), Lie(1), Moved(ring=True, messages=2, part=1)),
        # From channels to samples, each process gets the others' quarters of its own quarter: half of them from the other host.
        (Grid(4, 1), Lie(1, 4), Lie(4), Moved(ring=False, messages=2, part=2 * 2 / 16)),
        # From batch to columns of 2x2 and strips: what a process has, it needs half of.
        (Grid(2, 2), Lie(4), Lie(2, 1, 2), Moved(ring=False, messages=1, part=2 * 1 / 8)),
        (Grid(4, 1), Lie(4), Lie(2, 1, 2), Moved(ring=False, messages=0, part=0)),
    ],
)
def test_moved_activations_count_where_they_leave_a_host(main: Grid, held: Lie, needed: Lie, expected: Moved) -> None:
    assert Hosts(2, main).moved(held, needed) == expected


def test_a_plan_is_priced_where_its_main_grid_puts_processes() -> None:
    """Rows of 2x2 add up in memory only if 2x2 is the main grid."""
    layers = stages([LayerShape(name, "linear", (256,), (256,), 256 * 256) for name in "ab"])
    problem = Problem(layers, 8, 4, Link(200e-6, 8e-9), Ours(per_host=2), flops_per_s=1e12)
    rows, column = Placed("model", Grid(2, 2)), Placed("model", Grid(4, 1))
    first, second = (price(problem, [one, other]).layers for one, other in ((rows, column), (column, rows)))
    assert first[0].cost.dw.nic_bytes == 0
    assert second[1].cost.dw.nic_bytes == 2 * 4 * 128 * 256  # both rows' halves
    assert first[1].cost.dw == second[0].cost.dw  # of a column of all, each has a part of its own
    assert Paper().put_by(Grid(4, 1)) == Paper()
    assert Ours(per_host=4).put_by(Grid(4, 1)) == Ours(per_host=4)


def test_the_best_plan_has_its_processes_where_it_says() -> None:
    """The planner's price is that of a plan whose main grid puts processes on hosts."""
    layers = stages([LayerShape(name, "linear", (512,), (512,), 512 * 512, flops=2 * 512 * 512) for name in "abc"])
    problem = Problem(layers, 64, 8, Link(200e-6, 8e-9), Ours(per_host=4), overlap=1.0, flops_per_s=1e11)
    found = plan(problem)
    assert found.problem.pricing == Ours(per_host=4, main=main_grid(found.placed))
    assert found.price == price(problem, found.placed)


def test_nothing_to_send() -> None:
    assert Hosts(2, Grid(2, 2)).among(Grid(2, 2), "columns").all_reduced(0, 4) == Sent(0, 0)
