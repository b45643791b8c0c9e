"""What this project's own runtime sends: an alternative to the paper's equations for pricing a plan.

It differs in five ways. The collectives are those of `zmqtrain.collectives` and `zmqtrain.parallel`, with their own numbers of
messages. Between model-parallel layers of one grid, activations stay divided until the next product and are gathered for it after
pooling, and their gradient is then only scattered: half of the paper's all-reduce. Halos are the rows that really cross a boundary,
k - s of them, also in pools. Norms sum statistics. And processes of one host send nothing to each other: they sum gradients in
memory, and share the host's NIC for everything else.

It is exact if shares are even, and otherwise slightly more than the busiest process's cost. `zmqtrain.parallel.rehearsal` is exact
for any model, but has to run it on tensors without content.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from zmqtrain.parallel.communicator import AT_ONCE_BYTES
from zmqtrain.parallel.geometry import Count, Division, even, follow, grid_traffic, halo_traffic
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.collective import all_reduce, idle, ring
from zmqtrain.plan.costs import WORD_BYTES
from zmqtrain.plan.hosts import MOVED, Hosts, Members, Spread
from zmqtrain.plan.layers import PASSES, Reaches, Stage
from zmqtrain.plan.link import NOTHING, Array, ChangedByte, Changes, Cost, LayerCost
from zmqtrain.plan.placed import Integers, Lie, Lies, Placed, lacking

#: Bytes of the numbers in which statistics of strips are summed.
STATISTICS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ours:
    """Implements `zmqtrain.plan.costs.Pricing`."""

    word_bytes: int = WORD_BYTES
    per_host: int = 1
    """The number of the group's processes on each host."""
    main: Grid | None = None
    """The grid by whose rows processes are put on hosts (`zmqtrain.plan.hosts`); ``None``: for each layer its own."""
    bucket_bytes: int = 0
    """Weight gradients travel in buckets of about this size, in which small layers share messages, as a run's exchange has them. 0:
    each layer's by themselves, as those of `zmqtrain.parallelize` alone."""

    def put_by(self, main: Grid) -> Ours:
        """Nothing changes where each process has a host of its own, or all are on one."""
        return self if self.per_host == 1 or main.size <= self.per_host else replace(self, main=main)

    @property
    def pairs(self) -> bool:
        """Yes: this runtime finds them."""
        return True

    @property
    def strips(self) -> bool:
        """Yes: this runtime can divide images by their width, or by height and width."""
        return True

    def layer(
        self, stage: Stage, placed: Placed, batch: int, *, first: bool, last: bool = False, joined: int = 0, told: int = 0
    ) -> LayerCost:
        samples = math.ceil(batch / placed.grid.columns)
        there, back = self._statistics(stage, placed, samples)
        if told:
            last, there = False, there + self._told(told * samples, placed.grid, "columns", 1, self.word_bytes)
        always = LayerCost(dw=self._weights(stage, placed), statistics=there, statistics_back=back)
        if placed.choice == "model":
            gathered = self._input(stage, placed, samples, joined) + self._output(stage, placed, samples, last)
            return replace(always, all_gather=gathered, dx=self._input_gradient(stage, placed, samples, joined, first))
        if placed.choice == "domain":
            there, back = self._halos(stage, placed, samples, first)
            return replace(always, halo=there, halo_back=back)
        return always

    def joins(self, before: Stage, source: Placed, stage: Stage, target: Placed) -> bool:
        """Whether both layers are products that are model-parallel on one grid."""
        return source == target and target.choice == "model" and before.leaves_channels and _takes_channels(stage)

    def change(self, before: Stage, source: Placed, after: Stage, target: Placed, *, back: bool = False) -> tuple[float, Cost]:
        return self.changes(before, [source], after, [target], back=back).one()

    def changes(
        self, before: Stage, sources: Sequence[Placed], after: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        """A message to each of the processes that need a part; strips are gathered before an image is flattened."""
        left = _left(before, sources)
        held, needed = Lies.of(left, 0), Lies.of([_needed(after, each) for each in targets], 1)
        ways = [(held, needed)]
        if not after.head.image:
            flat = Lies.of([replace(each, strips=1, wide=1) for each in left], 0)
            ways = [(held, flat), (flat, needed)]
        return self._moved(before, sources[0].grid.size, ways, back)

    def meetings(
        self, before: Stage, sources: Sequence[Placed], at: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        """The changes towards what the other stage leaves divided: see `changes`."""
        ways = [(Lies.of(_left(before, sources), 0), Lies.of(_left(at.alone, targets), 1))]
        return self._moved(before, sources[0].grid.size, ways, back)

    def returned(self, stage: Stage, placed: Placed, main: Grid, *, back: bool = False) -> Changes:
        """Strips are gathered first. It stays where it lies if every process was given all samples."""
        held = _left(stage, [replace(placed, choice="whole") if placed.choice == "model" else placed])[0]
        whole = replace(held, strips=1, wide=1)
        ways = [(held, whole)] if held != whole else []
        if main.columns > 1 and placed.choice != "batch" and placed.grid != main:
            ways.append((whole, Lie(main.columns)))
        return self._moved(
            stage, placed.grid.size, [(Lies.of([one], 0), Lies.of([other], 1)) for one, other in ways or [(held, held)]], back
        )

    def _moved(self, before: Stage, size: int, ways: Sequence[tuple[Lies, Lies]], back: bool) -> Changes:
        """From each of some divisions to each of others, in one or more steps."""
        shape = len(ways[0][0].samples), ways[-1][1].samples.shape[1]
        messages, share, on_nic, memory = (np.zeros(shape) for _ in range(4))
        for one, other in ways:
            number, part = lacking(other, one) if back else lacking(one, other)
            memory = memory + 2 * part * size
            if not back:
                number, part = _gathered(before, one, other, number, part)
            share, of_host = share + part, part
            if 1 < self.per_host < size:
                number, of_host = self._between_hosts(one, other, size, back, number, part)
            messages, on_nic = messages + number, on_nic + of_host
        if size <= self.per_host:
            nothing = np.zeros_like(share)
            return Changes(nothing, ChangedByte(nothing, nothing, memory))
        return Changes(messages, ChangedByte(share, on_nic, np.zeros_like(share)))

    def _between_hosts(
        self, one: Lies, other: Lies, size: int, back: bool, messages: Integers, share: Array
    ) -> tuple[Integers, Array]:
        """Of a process's messages and bytes, what goes from one host to another: messages, and the share of the busiest NIC."""
        if size > MOVED:
            return messages, share * np.minimum(np.gcd(one.samples, other.samples), self.per_host)
        found, on_nic = np.zeros_like(messages), np.zeros_like(share)
        every, others = one.each(), other.each()
        numbers = (np.arange(len(each.samples.flat)).reshape(each.samples.shape) for each in (one, other))
        rows, columns = np.broadcast_arrays(*numbers)
        for place in np.ndindex(found.shape):
            held, needed = every[rows[place]], others[columns[place]]
            hosts = self._hosts(held.grid(size))
            moved = hosts.moved(needed, held) if back else hosts.moved(held, needed)
            found[place] = moved.messages
            on_nic[place] = moved.part * (share[place] if moved.ring else 1)
        return found, on_nic

    def change_key(self, before: Stage, after: Stage) -> Hashable:
        """How a layer's output is divided, the number of parts possible, and what the next layer accepts."""
        left = before.leaves((2, 1)), before.leaves((1, 2)), before.image_size
        takes = after.head.kind in PASSES, after.head.image, after.head.by_inputs
        return before.leaves_channels and before.head.units, left, takes, self.main

    # Model-parallel layers.

    def _input(self, stage: Stage, placed: Placed, samples: int, joined: int) -> Cost:
        """Gathering the input here, if it arrives divided."""
        return self._ring(samples * stage.head.numel_in, joined, placed, stage.head.calls) if joined else NOTHING

    def _output(self, stage: Stage, placed: Placed, samples: int, last: bool) -> Cost:
        """Gathering the output, in the layer itself or because the next layers do not accept it divided."""
        head, mixing = stage.head, stage.gathered_at
        if head.sums or head.by_inputs:
            return self._sum_waited_for(samples * head.numel_out, placed, (head.sums or 1) * head.calls)
        if head.kind == "recurrent":  # each layer gathers its outputs at every position
            return self._ring(samples * head.outputs[-1], head.units, placed, stage.rounds)
        if head.kind not in PASSES:
            return self._ring(samples * head.numel_out, head.units, placed, head.calls)
        if mixing is not None:
            return self._ring(samples * mixing.numel_in, head.units, placed, mixing.calls)
        return self._ring(samples * stage.layers[-1].numel_out, head.units, placed, head.calls) if last else NOTHING

    def _input_gradient(self, stage: Stage, placed: Placed, samples: int, joined: int, first: bool) -> Cost:
        head, numel, rounds = stage.head, samples * stage.head.numel_in, stage.head.calls
        if head.kind == "embedding" or head.by_inputs:
            return NOTHING
        if head.sums:
            return self._sum_waited_for(numel, placed, (head.sums - first) * rounds)
        recurrent = NOTHING
        if head.kind == "recurrent":  # the outputs' gradients are scattered at every position
            recurrent = self._scatter(samples * head.outputs[-1], head.units, placed, stage.rounds)
        if first:
            return recurrent
        if head.groups > 1 and placed.grid.rows <= head.groups:  # each row has its own groups' gradients, in turn
            return self._scatter(numel, head.groups, placed, rounds)
        if joined and head.groups == 1:
            return self._scatter(numel, joined, placed, rounds)
        return recurrent + self._sum_waited_for(numel, placed, rounds)

    # Domain-parallel layers.

    def _halos(self, stage: Stage, placed: Placed, samples: int, first: bool) -> tuple[Cost, Cost]:
        """Halos in forward and backward, for the strips that follow from even strips of the input image."""
        if placed.strips == 1:
            return NOTHING, NOTHING
        parts = placed.parts
        layers = [
            layer for layer in stage.layers if layer.image and layer.kind in ("conv", "pool") and not layer.pools_to_one(parts)
        ]
        sizes = [each.length for each in stage.before[0]] if stage.before else stage.head.inputs[1:]
        divisions = even(sizes[0], parts[0]), even(sizes[1], parts[1])
        for reaches in stage.before:
            divisions = _halo(reaches, divisions).outputs
        there, back = (np.zeros((2, placed.strips)) for _ in range(2))  # messages and bytes of each row
        for layer in layers:
            halo = _halo(layer.reaches, divisions)
            place_bytes = samples * layer.inputs[0] * self.word_bytes * layer.calls
            scale = np.array([[layer.calls], [place_bytes]])
            there += scale * _counts(halo.forward)
            if not (first and layer is stage.head):
                back += scale * _counts(halo.backward)
            divisions = halo.outputs
        return self._rows(there, placed), self._rows(back, placed)

    def _rows(self, sent: Array, placed: Placed) -> Cost:
        """``sent``: the messages and the bytes that each row sends to its neighbours."""
        messages, nbytes = sent
        if placed.grid.size <= self.per_host:
            return Cost(memory_bytes=2 * float(nbytes.max()) * placed.grid.size)
        if self.per_host == 1:
            return Cost.sent(float(messages.max()), float(nbytes.max()))
        near = self._hosts(placed.grid).neighbours(placed.grid, placed.parts)
        return Cost(float((messages * near.away).max()), float(nbytes.max()), float((near.by_host @ nbytes).max()))

    # All layers.

    def _statistics(self, stage: Stage, placed: Placed, samples: int) -> tuple[Cost, Cost]:
        """The sums of statistics in forward and backward."""
        grid, there, back = placed.grid, NOTHING, NOTHING
        members: Members = "rows" if placed.choice in ("model", "whole") else "all"
        size = grid.columns if members == "rows" else grid.size
        divided = placed.choice == "model" and stage.head.kind in PASSES
        for layer in stage.layers:
            divided = divided and not layer.mixes
            if layer.statistics and size > 1:
                channels = math.ceil(layer.outputs[0] / grid.rows) if divided else layer.outputs[0]
                itemsize = STATISTICS_BYTES if placed.choice == "domain" else self.word_bytes
                there += self._told(2 * channels + 1, grid, members, layer.calls, itemsize)
                back += self._sum(2 * channels, grid, members, layer.calls, itemsize)
            elif layer.means and (placed.strips > 1 or (divided and layer.means % grid.rows)):
                numel = samples * layer.means
                there += self._sum(numel, grid, "columns", 2 * layer.calls)
                back += self._sum(2 * numel, grid, "columns", layer.calls)
            if layer.running:
                channels = math.ceil(layer.outputs[0] / grid.rows) if divided else layer.outputs[0]
                there += self._sum(2 * channels, grid, "rows", layer.calls)
            if placed.strips > 1 and layer.pools_to_one(placed.parts):
                there += self._sum(samples * layer.numel_out, grid, "columns", layer.calls)
        return there, back

    def _weights(self, stage: Stage, placed: Placed) -> Cost:
        """The sums of weight gradients, layer by layer: of divided ones over the row, of all others over all
        (`zmqtrain.parallel.sums.contributors`)."""
        grid, total = placed.grid, NOTHING
        apart = placed.choice in ("batch", "domain")
        divided = placed.choice == "model"
        for layer in stage.layers:
            if layer is not stage.head:
                divided = divided and stage.head.kind in PASSES and not layer.mixes and layer.kind != "own"
            for part in layer.weights_by_message if layer.weights else ():
                units = part.units
                if divided:
                    units = layer.most_units(grid.rows) if units == layer.units else -(-units // grid.rows)
                numel = units * part.each
                if apart or not divided:
                    total += self._added(grid, "all", numel + part.whole)
                else:
                    total += self._added(grid, "rows", numel) + self._added(grid, "all", part.whole)
        return total

    def _ring(self, numel: int, units: int, placed: Placed, rounds: int) -> Cost:
        """A column's all-gathers of ``numel`` elements each, of which each row has some of ``units``."""
        spread = self._spread(placed.grid, "columns")
        if spread.local:
            return self._in_memory(numel * rounds, spread, self.word_bytes)
        sent = ring(numel, units, spread.size)
        nbytes = sent.numel * rounds * self.word_bytes
        return Cost(min(sent.messages, spread.hops) * rounds, nbytes, nbytes * spread.links)

    def _scatter(self, numel: int, units: int, placed: Placed, rounds: int) -> Cost:
        """A column's reduce-scatters: each process sends every other one its part itself, so that of several on a host each sends
        to all on other hosts."""
        spread, cost = self._spread(placed.grid, "columns"), self._ring(numel, units, placed, rounds)
        if spread.local or spread.apart:
            return cost
        return replace(cost, nic_bytes=spread.pairs_away / spread.size * numel * rounds * self.word_bytes)

    def _sum_waited_for(self, numel: int, placed: Placed, rounds: int) -> Cost:
        """A column's all-reduces of ``numel`` elements each, which wait for their own pieces."""
        spread, cost = self._spread(placed.grid, "columns"), self._sum(numel, placed.grid, "columns", rounds)
        if spread.local:
            return cost
        waits = idle(numel, spread.size, self.word_bytes) * rounds * self.word_bytes
        return cost + Cost(nic_bytes=waits * spread.crossing)

    def _sum(self, numel: int, grid: Grid, members: Members, rounds: int, itemsize: int = 0) -> Cost:
        """All-reduces of ``numel`` elements each, of all columns, all rows, or all processes."""
        spread, itemsize = self._spread(grid, members), itemsize or self.word_bytes
        if spread.local:
            return self._in_memory(numel * rounds, spread, itemsize)
        away = spread.all_reduced(numel, itemsize)
        nbytes = all_reduce(numel, spread.size, itemsize).numel * rounds * itemsize
        return Cost(away.messages * rounds, nbytes, away.numel * rounds * itemsize)

    def _told(self, numel: int, grid: Grid, members: Members, rounds: int, itemsize: int) -> Cost:
        """Each process tells all others ``numel`` elements, those of its own host in memory."""
        spread = self._spread(grid, members)
        if spread.local:
            return self._in_memory(numel * rounds, spread, itemsize)
        away, nbytes = spread.most_away, numel * rounds * itemsize
        cost = Cost(away * rounds, away * nbytes, spread.pairs_away * nbytes)
        return replace(cost, beside=(away - 1) * rounds) if numel * itemsize <= AT_ONCE_BYTES else cost

    def _added(self, grid: Grid, members: Members, numel: int) -> Cost:
        """Sums of weight gradients, of all rows or of all processes: their part in the buckets that they fill."""
        spread = self._spread(grid, members)
        if spread.size == 1 or numel == 0:
            return NOTHING
        memory = spread.added_here * numel * self.word_bytes
        if spread.local:
            return Cost(memory_bytes=memory)
        filled = max(numel, self.bucket_bytes // self.word_bytes)
        sent, on_host = spread.added(filled, self.word_bytes)
        wire = Cost(sent.messages, sent.numel * self.word_bytes, on_host * self.word_bytes)
        return wire.times(numel / filled) + Cost(memory_bytes=memory)

    def _in_memory(self, numel: int, spread: Spread, itemsize: int) -> Cost:
        """Groups that are each on one host: each process writes its part, and all read everything."""
        return Cost(memory_bytes=spread.groups_here * (spread.size + 1) * numel * itemsize) if spread.size > 1 else NOTHING

    def _spread(self, grid: Grid, members: Members) -> Spread:
        return self._hosts(grid).among(grid, members)

    def _hosts(self, grid: Grid) -> Hosts:
        return Hosts(self.per_host, self.main or grid)


def _takes_channels(stage: Stage) -> bool:
    """Whether a layer that is model-parallel gathers its input itself."""
    return stage.head.kind in PASSES and not stage.head.by_inputs


def _needed(stage: Stage, placed: Placed) -> Lie:
    """How a stage takes its inputs."""
    needs = placed.needs()
    return replace(needs, channels=placed.grid.rows) if stage.head.by_inputs and placed.choice == "model" else needs


def _left(stage: Stage, placed: Sequence[Placed]) -> list[Lie]:
    """How a stage's outputs lie."""
    strips = {parts: stage.leaves(parts) for parts in {each.parts for each in placed}}
    return [each.leaves(channels=stage.leaves_channels, strips=strips[each.parts]) for each in placed]


def _gathered(before: Stage, one: Lies, other: Lies, messages: Integers, share: Array) -> tuple[Integers, Array]:
    """Messages and share where a ring within each column brings together what its rows hold; elsewhere as they were."""
    rings = (one.samples == other.samples) & (other.channels == 1) & (other.strips == 1) & (other.wide == 1)
    rings &= (one.strips == 1) | (one.wide == 1)
    tall, wide = before.image_size
    units = np.where(one.channels > 1, before.head.units, np.where(one.wide > 1, wide, tall))
    rows = np.maximum(np.maximum(one.channels, one.strips), one.wide)
    smallest = np.where(rows == 1, units, units // rows)  # as in `ring`
    passed = np.where(rows == 1, 0, np.where(smallest > 0, rows - 1, np.minimum(units, rows - 1)))
    return np.where(rings, passed, messages), np.where(rings, (units - smallest) / units / one.samples, share)


@dataclass(frozen=True, slots=True)
class _Halo:
    """The places and messages that each part of an image sends, and how the output is divided."""

    forward: tuple[Count, ...]
    backward: tuple[Count, ...]
    outputs: tuple[Division, Division]


@lru_cache(maxsize=4096)
def _halo(reaches: Reaches, divisions: tuple[Division, Division]) -> _Halo:
    """Bytes are numbers of places."""
    outputs = follow(reaches[0], divisions[0]), follow(reaches[1], divisions[1])
    tall, wide = divisions
    if len(wide) == 1:
        sent = halo_traffic(reaches[0], tall, outputs[0], wide[0][1])
    elif len(tall) == 1:
        sent = halo_traffic(reaches[1], wide, outputs[1], tall[0][1])
    else:
        sent = grid_traffic(reaches, divisions, outputs, 1)
    return _Halo(sent["forward"], sent["backward"], outputs)


def _counts(sent: Sequence[Count]) -> Array:
    """Messages and places of each row."""
    return np.array([[each.messages for each in sent], [each.nbytes for each in sent]], float)
