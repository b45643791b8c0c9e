"""The input of a plan: the model, the batch, the processes and the network; and the choices of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.plan.costs import Paper, Pricing
from zmqtrain.plan.graph import Graph, graph_of
from zmqtrain.plan.layers import DIVISIBLE, INPUT, LayerShape, Stage
from zmqtrain.plan.link import Link
from zmqtrain.plan.memory import Memory, memory
from zmqtrain.plan.placed import Placed
from zmqtrain.topology.main_grid import divides
from zmqtrain.topology.suggest import did_you_mean

#: Choices that divide a layer over rows.
ROW_CHOICES: tuple[Choice, ...] = ("model", "domain", "whole")


#: The parts of an image up to which other strips than those of the height are proposed, which bounds the planner's time.
MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """The possible placements of a layer, and why others are impossible."""

    placed: tuple[Placed, ...]
    excluded: dict[str, str] = field(default_factory=dict)
    """A choice, or a choice on certain grids -> the reason."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything on which a plan depends."""

    layers: tuple[Stage, ...]
    batch: int
    """Samples per step, over all processes."""
    processes: int
    link: Link
    pricing: Pricing = field(default_factory=Paper)
    overlap: float = 0.0
    """The share of possible overlap of communication with compute that really happens: 0 none, 1 perfect."""
    flops_per_s: float = 0.0
    """The speed of a process, for layers whose times are not known; 0: such layers take no time."""
    memory_bytes: float | None = None
    """The largest memory that a process may need."""
    optimizer_words: int = 1
    charge_changes: bool = True
    """Whether changes of placement between layers cost what Eq. 6 says."""
    main: Grid | None = None
    """The only grid that plans may have as their main one (`main_grid`); ``None``: any."""
    whole_model: bool = False
    """Whether only the batch may be divided and not the model, for example in float16 (`zmqtrain.topology.rules`)."""
    graph: Graph = field(init=False, repr=False, compare=False)
    """Which layers take the outputs of which."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError("there is nothing to plan: the model has no layer with weights")
        if self.batch < 1 or self.processes < 1:
            raise UsageError(f"a plan needs at least one sample and one process, not {self.batch} and {self.processes}")
        object.__setattr__(self, "graph", graph_of(self.layers))

    def put_by(self, main: Grid) -> Problem:
        """The same where processes are put on hosts by the rows of ``main``."""
        pricing = self.pricing.put_by(main)
        return self if pricing == self.pricing else replace(self, pricing=pricing)

    def with_main(self, main: Grid) -> Problem:
        """The same for plans of which ``main`` is the main grid."""
        return replace(self.put_by(main), main=main)

    def stage(self, index: int, placed: Placed, *, paired: bool = True) -> Stage:
        """A layer as it is divided in this placement. ``paired``: whether all of its pair, if it has one, are placed alike."""
        stage = self.layers[index]
        return stage.paired if paired and self.divides_pair(index, placed) else stage

    def divides_pair(self, index: int, placed: Placed) -> bool:
        """Whether a layer is divided together with the others of its pair, if these are placed like it."""
        pair = self.layers[index].head.pair
        known = pair is not None and self.pricing.pairs and placed.choice == "model" and pair.fits(placed.grid.rows)
        return known and bool(self.graph.mates(index))

    def batch_bytes(self, numel: int) -> int:
        """Bytes of the whole batch's activations of which a sample has ``numel``."""
        return self.batch * numel * self.pricing.word_bytes

    def grids(self) -> list[Grid]:
        """All shapes of the group, from 1xP to Px1."""
        return [Grid(rows, self.processes // rows) for rows in range(1, self.processes + 1) if self.processes % rows == 0]

    def options(self, stage: Stage) -> Options:
        """The choices of a layer on all grids."""
        placed: list[Placed] = []
        excluded: dict[str, str] = {}
        every = [Placed.of("batch", Grid(1, self.processes))]
        every += [Placed(choice, grid) for choice in ROW_CHOICES for grid in self.grids() if grid.rows > 1]
        images = tuple(_reaching(each.head) for each in self.layers if each.head.image) if self.pricing.strips else ()
        for one in every:
            if one.choice == "domain" and images and one.strips <= MOST_PARTS:
                per_message = self.link.alpha_s / (self.link.byte_s * self.pricing.word_bytes) * one.samples / self.batch
                ways = dict.fromkeys((_best_wide(images, one.strips, per_message), 1))
                one = next((way for wide in ways if not self.obstacle(stage, way := replace(one, wide=wide))), one)
            reason = self.obstacle(stage, one)
            if reason is None:
                placed.append(one)
            else:
                key = one.choice if reason.always else str(one)
                excluded.setdefault(key, reason.text)
        divided = [one for one in placed if one.choice != "whole"]
        if divided and not any(stage.seconds(self.flops_per_s)):
            placed = divided
            excluded["whole"] = "its price is compute, but compute times are not known"
        return Options(tuple(placed), excluded)

    def obstacle(self, stage: Stage, placed: Placed) -> Obstacle | None:
        """Why a layer cannot be placed in this way; none if it can."""
        head, grid = stage.head, placed.grid
        if self.whole_model and grid.rows > 1:
            return Obstacle("float16 requires models that are not divided", always=True)
        if placed.choice == "model" and head.kind not in DIVISIBLE:
            return Obstacle(f"a layer of kind {head.kind} has no outputs by which its weights could be divided", always=True)
        if placed.choice == "domain" and not all(layer.image for layer in (head, *_spatial(stage))):
            return Obstacle("its input is not an image", always=True)
        if placed.samples > self.batch:
            return Obstacle(
                f"a batch of {self.batch} samples cannot be divided into {placed.samples} parts", always=placed.choice == "batch"
            )
        if placed.choice == "model" and grid.rows > head.units:
            return Obstacle(f"there would be more rows than its {head.units} outputs")
        if placed.choice == "model" and grid.rows > head.groups > 1 and grid.rows % head.groups:
            return Obstacle(f"each row must have whole groups of its {head.groups}, or a part of one")
        if placed.choice == "domain":
            for parts, axis, what in zip(placed.parts, (1, 2), ("rows", "columns"), strict=True):
                least = min(head.inputs[axis], head.outputs[axis])
                if parts > least:
                    return Obstacle(f"there would be more {what} than the {least} of its image")
        return None

    def seconds(self, stage: Stage, placed: Placed) -> tuple[float, float]:
        """Seconds of the slowest process: forward and backward."""
        forward, backward = stage.seconds(self.flops_per_s, first=stage.name == self.layers[0].name or stage.source == INPUT)
        grid = placed.grid
        share = math.ceil(self.batch / placed.samples)
        if placed.choice == "model":
            work = share * math.ceil(stage.head.units / grid.rows) / stage.head.units
        elif placed.choice == "domain":
            work = float(share)
            for parts, size in zip(placed.parts, stage.head.outputs[1:], strict=True):
                work *= math.ceil(size / parts) / size
        else:
            work = share
        return forward * work, backward * work

    def memory(self, stage: Stage, placed: Placed) -> Memory:
        """The memory of one process for a layer."""
        return memory(stage, placed, self.batch, word_bytes=self.pricing.word_bytes, optimizer_words=self.optimizer_words)


def main_grid(placed: Sequence[Placed]) -> Grid:
    """The grid whose columns are given a plan's samples: the first one by whose rows a layer is computed."""
    return next((each.grid for each in placed if divides(each.choice, each.grid.rows)), placed[0].grid)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a placement is impossible."""

    text: str
    always: bool = False
    """On any grid."""


def plan_of(problem: Problem, placed: Sequence[Placed]) -> Plan:
    """The plan in the form that `zmqtrain.parallelize` takes."""
    return Plan(
        tuple(
            LayerPlan(stage.name, how.choice, how.grid, how.strips_text) for stage, how in zip(problem.layers, placed, strict=True)
        )
    )


def placed_of(problem: Problem, plan: Plan) -> list[Placed]:
    """A plan's placement of each layer. Raises `UsageError` if the plan is for another model, or cannot be carried out."""
    names = [stage.name for stage in problem.layers]
    unknown = [layer.layer for layer in plan if layer.layer not in names]
    missing = [name for name in names if plan.of(name) is None]
    if unknown or missing:
        meant = did_you_mean(unknown[0], names) if unknown else None
        parts = [
            f"it has no layer {unknown[0]!r}" + (f" (did you mean {meant!r}?)" if meant else "") if unknown else "",
            f"the plan has no entry for {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else "") if missing else "",
        ]
        raise UsageError(f"the plan is for another model than this one: {'; '.join(filter(None, parts))}")
    if plan.size != problem.processes:
        raise UsageError(f"the plan is for {plan.size} processes, but the group has {problem.processes}")
    found = []
    for stage in problem.layers:
        layer = plan.of(stage.name)
        assert layer is not None
        one = Placed.of(layer.choice, layer.grid, layer.parts.width if layer.choice == "domain" else 1)
        reason = problem.obstacle(stage, one)
        if reason is not None:
            raise UsageError(f"the plan's {layer.choice} {layer.grid} of layer {stage.name} is impossible: {reason.text}")
        found.append(one)
    return found


#: Of a layer: its image's channels, height and width, and the rows that a part needs beyond its edge.
_Image: TypeAlias = tuple[int, int, int, int]


def _reaching(layer: LayerShape) -> _Image:
    return (*layer.inputs, max(layer.kernel) // 2)  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def _best_wide(images: tuple[_Image, ...], rows: int, per_message: float) -> int:
    """Into how many parts the width of a model's images is best divided, over so many processes: the same for all layers, so that
    activations stay where they are. ``per_message``: elements of a sample that take as long as a message."""
    _, height, width, _ = images[0]

    def cost(wide: int) -> float:
        tall = rows // wide
        above, beside = min(tall - 1, 2), min(wide - 1, 2)
        return sum(
            (above + beside) * per_message + channels * reach * (above * wider / wide + beside * taller / tall)
            for channels, taller, wider, reach in images
            if reach
        )

    ways = [wide for wide in range(1, min(rows, width) + 1) if rows % wide == 0 and rows // wide <= height]
    return min(ways, key=lambda wide: (cost(wide), wide), default=1)


def _spatial(stage: Stage) -> list[LayerShape]:
    """Followers whose output depends on neighbouring rows."""
    return [layer for layer in stage.followers if layer.kind == "pool"]
