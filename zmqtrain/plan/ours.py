"""What this project's own runtime sends, as another way to price a plan than the paper's equations.

It differs in three ways. The collectives are those of `zmqtrain.collectives`, with their own numbers of messages. Halos are the
rows that really cross a cut, k - s of them, also at pools. And processes of one host send each other nothing: they add up gradients
in memory, and share the host's network card for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zmqtrain.plan.collective import Sent, all_gather, all_reduce
from zmqtrain.plan.costs import WORD_BYTES
from zmqtrain.plan.layers import LayerShape, Stage
from zmqtrain.plan.link import NOTHING, Cost, LayerCost
from zmqtrain.plan.placed import Placed, change


@dataclass(frozen=True, slots=True)
class Ours:
    """Implements `zmqtrain.plan.costs.Pricing`. Ranks lie on hosts in order, so a row is on one host if it fits."""

    word_bytes: int = WORD_BYTES
    per_host: int = 1
    """Processes of the group on each host."""
    rings: bool = False
    """Whether all collectives are rings, else those that `zmqtrain.collectives.choose` chooses."""

    def layer(self, stage: Stage, placed: Placed, batch: int, *, first: bool) -> LayerCost:
        grid = placed.grid
        samples = math.ceil(batch / grid.columns)
        match placed.choice:
            case "batch":
                return LayerCost(dw=self._sum_of_row(grid.size, stage.weights))
            case "whole":
                return LayerCost(dw=self._sum_of_row(grid.columns, stage.weights))
            case "model":
                rounds = stage.rounds
                dx = NOTHING if first else self._sum_of_column(placed, samples * stage.numel_in, rounds)
                return LayerCost(
                    all_gather=self._gather_of_column(placed, samples * stage.numel_out, rounds),
                    dx=dx,
                    dw=self._sum_of_row(grid.columns, math.ceil(stage.weights / grid.rows)),
                )
            case "domain":
                halos = [(layer, self._halo(layer, placed, samples)) for layer in stage.layers]
                back = [cost for layer, cost in halos if not (first and layer is stage.head)]
                return LayerCost(
                    halo=sum((cost for _, cost in halos), NOTHING),
                    halo_back=sum(back, NOTHING),
                    dw=self._sum_of_row(grid.size, stage.weights),
                )

    def change(self, source: Placed, target: Placed) -> tuple[float, Cost]:
        """A message to each of the processes that need a part."""
        lacking = change(source, target)
        if lacking.pieces == 1:
            return 0.0, NOTHING
        columns = math.gcd(source.samples, target.samples)
        if source.grid.size <= self.per_host:
            return 0.0, Cost(memory_bytes=2 * lacking.share * source.grid.size)
        return float(lacking.pieces - 1), Cost.sent(0, lacking.share, sharing=self._crossing(columns))

    def _halo(self, layer: LayerShape, placed: Placed, samples: int) -> Cost:
        """The rows that a process between two cuts sends; with two strips there is one cut, and the larger side's rows count."""
        rows, strips = layer.halo_rows if layer.image else 0, placed.strips
        if not rows or strips == 1:
            return NOTHING
        above = min(rows, layer.padding[0])
        sent = max(above, rows - above) if strips == 2 else rows
        sides = 1 if strips == 2 or above in (0, rows) else 2
        hops = math.ceil(max(above, rows - above) / max(1, layer.inputs[1] // strips))  # farther than the neighbour's strip
        numel = samples * sent * layer.row_numel * layer.calls
        if placed.grid.size <= self.per_host:
            return Cost(memory_bytes=2 * numel * self.word_bytes * placed.grid.size)
        messages = sides * hops * layer.calls
        return Cost.sent(messages, numel * self.word_bytes, sharing=self._crossing(placed.grid.columns))

    def _gather_of_column(self, placed: Placed, numel: int, rounds: int) -> Cost:
        size = placed.grid.rows
        if placed.grid.size <= self.per_host:  # each writes its part, and all read all
            return Cost(memory_bytes=placed.grid.columns * (size + 1) * numel * self.word_bytes)
        return self._wire(all_gather(_each(numel, rounds), size, self.word_bytes, ring=self.rings), placed, rounds)

    def _sum_of_column(self, placed: Placed, numel: int, rounds: int) -> Cost:
        size = placed.grid.rows
        if placed.grid.size <= self.per_host:
            return Cost(memory_bytes=placed.grid.columns * (size + 1) * numel * self.word_bytes)
        return self._wire(all_reduce(_each(numel, rounds), size, self.word_bytes, ring=self.rings), placed, rounds)

    def _wire(self, sent: Sent, placed: Placed, rounds: int) -> Cost:
        nbytes = sent.numel * rounds * self.word_bytes
        return Cost.sent(sent.messages * rounds, nbytes, sharing=self._crossing(placed.grid.columns))

    def _sum_of_row(self, size: int, numel: int) -> Cost:
        """Of weight gradients, by processes with neighbouring ranks: in memory on each host, then slice by slice between hosts."""
        if size == 1:
            return NOTHING
        here = math.gcd(size, self.per_host) if size < self.per_host else self.per_host
        hosts = math.ceil(size / here)
        rows = self.per_host // here  # rows that are added up on this host
        sent = all_reduce(math.ceil(numel / here), hosts, self.word_bytes, ring=self.rings)
        memory = rows * (here + 1) * numel * self.word_bytes if here > 1 else 0
        wire = Cost.sent(sent.messages, sent.numel * self.word_bytes, sharing=self.per_host)
        return wire + Cost(memory_bytes=memory)

    def _crossing(self, columns: int) -> int:
        """Processes of a host that send to another host at once, each column's in turn: its last one here."""
        return min(columns, self.per_host)


def _each(numel: int, rounds: int) -> int:
    return math.ceil(numel / rounds)
