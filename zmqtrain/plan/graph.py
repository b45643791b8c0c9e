"""Which stages take the outputs of which: a model as it branches, and what has to be brought together where branches meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zmqtrain.plan.layers import Meeting, Source, Stage, leading


@dataclass(frozen=True, slots=True)
class Brought:
    """An output that is brought to where another stage's output lies, because the two are added up."""

    source: int
    target: int
    numel: int
    """Elements of a sample."""
    charged: int
    """The stage with which it is counted."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Stages by their number in the order of the forward."""

    before: tuple[int | None, ...]
    """The stage where each one's input lies; ``None``: it is the model's input."""
    brought: tuple[Brought, ...]
    modules: tuple[tuple[str, int], ...]
    """The modules in whose forward branches meet, and the stage with which these messages are counted."""
    pairs: tuple[tuple[int, ...], ...] = ()
    """Stages that may be divided together, the last of each with its inputs."""

    @property
    def chain(self) -> bool:
        """Whether each stage takes the outputs of the one before it and nothing else, and none is divided with others."""
        return not self.pairs and not self.brought and self.before == (None, *range(len(self.before) - 1))

    def after(self, index: int) -> list[int]:
        """The stages that take a stage's output."""
        return [each for each, before in enumerate(self.before) if before == index]

    def mates(self, index: int) -> tuple[int, ...]:
        """The stages with which a stage may be divided together, with itself; none if there are none."""
        return next((pair for pair in self.pairs if index in pair), ())

    def near(self, index: int) -> tuple[int, ...]:
        """The stages on whose placement depends what a stage sends, itself among them: what the output's way back costs, which
        counts with the last stage, depends also on the main grid."""
        before = self.before[index]
        found = {index, *([] if before is None else [before])}
        found.update(end for each in self.brought if each.charged == index for end in (each.source, each.target))
        if index == self.output:
            found.update(end for end in range(len(self.before)) if self.ends(end))
        return tuple(sorted(found | {mate for each in found for mate in self.mates(each)}))

    @property
    def output(self) -> int:
        """The last stage whose output is the model's."""
        return max(index for index in range(len(self.before)) if self.ends(index))

    def ends(self, index: int) -> bool:
        """Whether nothing takes a stage's output: it is the model's."""
        return index not in self.before and all(each.source != index for each in self.brought)


def graph_of(layers: Sequence[Stage]) -> Graph:
    """The graph of these stages. Sources that are none of them count as the model's input."""
    return _graph(tuple((stage.name, stage.source, stage.head.pair.last if stage.head.pair else None) for stage in layers))


@lru_cache(maxsize=256)
def _graph(layers: tuple[tuple[str, Source | None, str | None], ...]) -> Graph:
    places = {name: index for index, (name, _, _) in enumerate(layers)}
    pairs: dict[str, list[int]] = {}
    for index, (name, _, last) in enumerate(layers):
        if last in places and name != last:
            pairs.setdefault(last, []).append(index)
    before: list[int | None] = []
    brought: list[Brought] = []
    modules: dict[str, int] = {}
    seen: set[Source] = set()

    def meet(source: Source) -> None:
        """Note what has to be brought to where the first branch lies; once, however many take the result."""
        if not isinstance(source, Meeting) or source in seen:
            return
        seen.add(source)
        ends = [_place(branch.source, places) for branch in source.branches]
        for branch in source.branches:
            meet(branch.source)
        charged = modules.setdefault(source.module, max((end for end in ends if end is not None), default=0))
        if not ends or ends[0] is None:
            return
        brought.extend(
            Brought(end, ends[0], branch.numel, charged)
            for end, branch in zip(ends[1:], source.branches[1:], strict=True)
            if end not in (None, ends[0])
        )

    for index, (_, source, _) in enumerate(layers):
        if source is None:
            before.append(index - 1 if index else None)
            continue
        meet(source)
        before.append(_place(source, places))
    together = tuple((*first, places[last]) for last, first in pairs.items())
    return Graph(tuple(before), tuple(brought), tuple(modules.items()), together)


def _place(source: Source, places: dict[str, int]) -> int | None:
    leader = leading(source)
    return None if leader is None else places.get(leader)
