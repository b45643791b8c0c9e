"""On which hosts the processes of a group are, and what of their messages goes from one host to another.

A run puts processes on hosts row after row of its plan's main grid (`zmqtrain.topology.placement`). On another grid of the same
plan, rows and columns lie across the same hosts in another way: a row may then be spread over all of them, and a column be on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from zmqtrain.collectives.choose import choose_all_reduce
from zmqtrain.collectives.schedule import doubling_all_reduce, halving_all_reduce
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.redistribute import Route, route
from zmqtrain.plan.collective import Sent, all_reduce
from zmqtrain.plan.placed import Array, Integers, Lie

#: Which processes exchange something: those of each column of a grid, those of each row, or all of it.
Members: TypeAlias = Literal["columns", "rows", "all"]
#: Of up to this many processes the busiest host is looked for; of more, it is taken to be the first one.
MOST_PROCESSES = 4096
#: All-reduces by halving and doubling are followed on each host of up to this many processes; of more, on the first one.
FOLLOWED = 64
#: Of up to this many processes, what each host sends between two placements is followed piece by piece.
MOVED = 16


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a group's processes."""

    per_host: int
    """How many processes are on each; the last host may have fewer."""
    main: Grid
    """The grid whose rows, one after another, are put on the hosts."""

    def of(self, ranks: Integers) -> Integers:
        """The number of each rank's host."""
        column, row = np.divmod(ranks, self.main.rows)
        found: Integers = (row * self.main.columns + column) // self.per_host
        return found

    def among(self, grid: Grid, members: Members) -> Spread:
        """The columns or the rows of a grid, or all of its processes."""
        return _spread(self, grid, members)

    def neighbours(self, grid: Grid, parts: tuple[int, int]) -> Neighbours:
        """Of the strips of images: ``parts`` of their height and width, in each of the grid's columns."""
        return _neighbours(self, grid, parts)

    def moved(self, held: Lie, needed: Lie) -> Moved:
        """What is sent between hosts so that activations come from one placement to another. Of up to `MOVED` processes."""
        return _moved(self, held, needed)


@dataclass(frozen=True, eq=False)
class Spread:
    """Groups of processes that exchange something at once, each within itself. Figures of a host are those of the host that has
    most to do."""

    size: int
    """The members of a group."""
    local: bool
    """Whether no group has members on two hosts."""
    apart: bool
    """Whether no group has two members on one host."""
    groups_here: int
    """How many groups have members on a host."""
    crossing: int
    """How many groups have members on a host and on others."""
    links: int
    """How many links of rings, each around a group in the order of its members, leave a host."""
    hops: int
    """How many of the messages that pass a part on around such a ring go from one host to another."""
    most_away: int
    """How many members of its group a process has on other hosts."""
    pairs_away: int
    """How many pairs there are of a member on a host and one of the same group elsewhere."""
    added_here: int
    """How many times its tensor's elements are read or written on a host to add up each group's tensors there."""
    hosts: Integers | None = None
    """[groups, size]: of each member. ``None``: each is on another one."""
    teams: tuple[tuple[int, int, int], ...] = ()
    """Of the groups on the busiest host: how many there are with so many members on their host with the fewest, and so many
    hosts."""

    @classmethod
    def alone(cls, size: int) -> Spread:
        """The spread of processes that have a host each."""
        others = size - 1
        return cls(size, not others, True, 1, min(1, others), min(1, others), others, others, others, 0, None, ((1, 1, size),))

    @classmethod
    def of(cls, hosts: Integers, *, every: bool) -> Spread:
        """``hosts``: [groups, size], of each member. ``every``: whether all groups are given; otherwise those that have members on
        the first host."""
        groups, size = hosts.shape
        count = int(hosts.max()) + 1
        pairs, here = np.unique(hosts + count * np.arange(groups)[:, np.newaxis], return_counts=True)
        group, host = np.divmod(pairs, count)  # each host of each group, with the number of members there
        away = size - here
        leaving = hosts != np.roll(hosts, -1, axis=1)

        def most(of: Integers, weights: Integers | None = None) -> int:
            by_host = np.bincount(of, weights, minlength=1)
            return int(by_host.max() if every else by_host[0])

        fewest = np.full(groups, size)
        np.minimum.at(fewest, group, here)
        teams = np.column_stack([fewest, np.bincount(group, minlength=groups)])
        busiest = int(np.bincount(host).argmax()) if every else 0
        there, number = np.unique(teams[group[host == busiest]], axis=0, return_counts=True)
        return cls(
            size,
            not away.any(),
            bool((here == 1).all()),
            most(host),
            most(host, (away > 0).astype(np.int64)),
            most(hosts[leaving]),
            min(size - 1, int(leaving.sum(1).max())),
            int(away.max()),
            most(host, here * away),
            most(host, np.where(here > 1, here + 1, 0)),
            hosts,
            tuple((many, slices, across) for many, (slices, across) in zip(number.tolist(), there.tolist(), strict=True)),
        )

    def all_reduced(self, numel: int, itemsize: int) -> Sent:
        """An all-reduce of ``numel`` elements in each group: the messages that follow one another from host to host, and the
        elements that a host sends."""
        if self.local or numel == 0:
            return Sent(0, 0)
        if self.apart:
            sent = all_reduce(numel, self.size, itemsize)
            return Sent(sent.messages, sent.numel * self.groups_here)
        return _all_reduced(self, numel, itemsize)

    def added(self, numel: int, itemsize: int) -> tuple[Sent, int]:
        """Each group adds up its members' tensors on each host, in memory, and then slice by slice between hosts
        (`zmqtrain.exchange.sums.HostSums`): as many slices as its host with the fewest members has, each by one process of each
        host. What a process sends, and the elements that a host sends."""
        sent = [(many * slices, all_reduce(-(-numel // slices), across, itemsize)) for many, slices, across in self.teams]
        one = Sent(max(each.messages for _, each in sent), max(each.numel for _, each in sent))
        return one, sum(many * each.numel for many, each in sent)


@lru_cache(maxsize=65536)
def _all_reduced(spread: Spread, numel: int, itemsize: int) -> Sent:
    """`Spread.all_reduced` where members of a group share hosts."""
    hosts = spread.hosts
    assert hosts is not None
    algorithm = choose_all_reduce(numel * itemsize, spread.size)
    if algorithm == "ring":
        return Sent(2 * spread.hops, all_reduce(numel, spread.size, itemsize).numel * spread.links)
    schedule = halving_all_reduce if algorithm == "halving" else doubling_all_reduce
    messages, sent_by = 0, np.zeros(int(hosts.max()) + 1, np.int64)
    followed = hosts < (len(sent_by) if hosts.size <= FOLLOWED else 1)
    for group, rank in np.argwhere(followed).tolist():
        away = [
            step
            for step in schedule(numel, spread.size, rank)
            if step.to is not None and hosts[group, step.to] != hosts[group, rank]
        ]
        messages = max(messages, len(away))
        sent_by[hosts[group, rank]] += sum(stop - start for step in away for start, stop in step.out)
    return Sent(messages, int(sent_by.max()))


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """How many of the neighbours of strips of images are on other hosts."""

    away: Array
    """[rows]: the share of each row's neighbours, in the column where it is largest."""
    by_host: Array
    """[hosts, rows]: the sum of these shares over those of a row's processes that are on a host."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What is sent between hosts so that activations come from one placement to another."""

    ring: bool
    """Whether it goes around rings, each of processes that need the same."""
    messages: int
    """The messages that follow one another around a ring; otherwise those that a process receives."""
    part: float
    """Of a ring, how many links leave a host. Otherwise what a host sends or receives, as a share of the whole batch's
    activations."""


@lru_cache(maxsize=4096)
def _spread(hosts: Hosts, grid: Grid, members: Members) -> Spread:
    if hosts.per_host == 1:
        return Spread.alone({"columns": grid.rows, "rows": grid.columns, "all": grid.size}[members])
    columns = np.arange(grid.size).reshape(grid.columns, grid.rows)
    where = hosts.of({"columns": columns, "rows": columns.T, "all": columns.reshape(1, -1)}[members])
    every = where.size <= MOST_PROCESSES
    return Spread.of(where if every else where[(where == 0).any(1)], every=every)


@lru_cache(maxsize=4096)
def _neighbours(hosts: Hosts, grid: Grid, parts: tuple[int, int]) -> Neighbours:
    where = hosts.of(np.arange(grid.size)).reshape(grid.columns, *parts)
    if grid.size > MOST_PROCESSES:
        where = where[(where == 0).any((1, 2))]
    away, neighbours = np.zeros(where.shape), np.zeros(where.shape)
    for axis in (1, 2):
        before, after = [slice(None)] * 3, [slice(None)] * 3
        before[axis], after[axis] = slice(None, -1), slice(1, None)
        for one, other in ((tuple(before), tuple(after)), (tuple(after), tuple(before))):
            away[one] += where[one] != where[other]
            neighbours[one] += 1
    share = (away / np.maximum(neighbours, 1)).reshape(len(where), -1)
    by_host = np.zeros((int(where.max()) + 1 if grid.size <= MOST_PROCESSES else 1, grid.rows))
    for host in range(len(by_host)):
        by_host[host] = (share * (where.reshape(share.shape) == host)).sum(0)
    return Neighbours(share.max(0), by_host)


@lru_cache(maxsize=65536)
def _moved(hosts: Hosts, held: Lie, needed: Lie) -> Moved:
    way = _route(hosts.main.size, held, needed)
    where = hosts.of(np.arange(hosts.main.size))
    if way.gatherings is not None:
        if not way.gatherings:
            return Moved(True, 0, 0.0)
        rings = Spread.of(where[np.array([sorted(each.members) for each in way.gatherings])], every=True)
        return Moved(True, rings.hops, float(rings.links))
    count, whole = int(where.max()) + 1, np.prod(way.shape)
    sent, received, messages = np.zeros(count), np.zeros(count), np.zeros(hosts.main.size)
    for piece in way.pieces:
        if where[piece.source] != where[piece.to]:
            share = np.prod([stop - start for start, stop in piece.block]) / whole
            sent[where[piece.source]] += share
            received[where[piece.to]] += share
            messages[piece.to] += 1
    return Moved(False, int(messages.max()), float(max(sent.max(), received.max())))


@lru_cache(maxsize=4096)
def _route(size: int, held: Lie, needed: Lie) -> Route:
    """How the runtime moves an activation that both divide evenly."""
    shape = (
        np.lcm(held.samples, needed.samples),
        np.lcm(held.channels, needed.channels),
        np.lcm(held.strips, needed.strips),
        np.lcm(held.wide, needed.wide),
    )
    sizes = (int(shape[0]), int(shape[1]), int(shape[2]), int(shape[3]))
    return route(_placement(size, held, sizes), _placement(size, needed, sizes), sizes)


def _placement(size: int, lie: Lie, shape: tuple[int, int, int, int]) -> Placement:
    grid = Grid(size // lie.samples, lie.samples)
    if lie.channels > 1:
        return Placement.over_rows(grid, 1, shape[1])
    if lie.strips > 1 and lie.wide > 1:
        across = Placement.over_rows(Grid(lie.wide, lie.samples), 3, shape[3]).divisions
        down = Placement.over_rows(Grid(lie.strips, lie.samples), 2, shape[2]).divisions
        return Placement(grid, divided=2, divisions=down, across=3, across_divisions=across)
    if lie.strips > 1 or lie.wide > 1:
        dimension = 2 if lie.strips > 1 else 3
        return Placement.over_rows(grid, dimension, shape[dimension])
    return Placement(grid)
