"""A plan: how each layer of a model is divided. What a planner computes, a person may write, and `parallelize` carries out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid

#: ``model``: the weights' outputs are divided over the rows, samples over the columns. ``domain``: images are divided over the rows
#: (`Strips`), samples over the columns, weights are whole. ``batch``: samples are divided over all processes, weights are whole.
#: ``whole``: each process of a column computes the whole layer on the column's samples.
Choice = Literal["model", "domain", "batch", "whole"]


_PARTS = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")


@dataclass(frozen=True, slots=True)
class Strips:
    """Into how many parts images are divided: ``height`` times ``width`` is Pr."""

    height: int
    width: int

    @classmethod
    def parse(cls, text: str, rows: int) -> Strips:
        """What ``height``, ``width`` or a grid of strips like ``2x2`` means on a grid with these rows. Raises `UsageError`."""
        if text in ("height", "width"):
            return cls(rows, 1) if text == "height" else cls(1, rows)
        match = _PARTS.fullmatch(text)
        if match is None:
            raise UsageError(f'strips {text!r} must be "height", "width", or rows x columns of the image, like "2x2"')
        found = cls(int(match[1]), int(match[2]))
        if found.height * found.width != rows:
            raise UsageError(f"strips {text!r} are {found.height * found.width} parts of an image, but the grid has {rows} rows")
        return found


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How one layer is divided, and over which grid. All grids of a plan have the same number of processes."""

    layer: str
    """The module's name in the model, like ``features.3``."""
    choice: Choice
    grid: Grid
    strips: str = "height"
    """Of ``domain``: how images are divided over the rows, along their ``height``, their ``width``, or both like ``2x2``."""

    def __post_init__(self) -> None:
        if self.choice != "domain" and self.strips != "height":
            raise UsageError(f"layer {self.layer!r} of the plan: strips are for the choice domain, not for {self.choice}")
        Strips.parse(self.strips, self.grid.rows)

    @property
    def parts(self) -> Strips:
        """Into how many parts images are divided where the choice is ``domain``."""
        return Strips.parse(self.strips, self.grid.rows)


@dataclass(frozen=True, slots=True)
class Plan:
    """Layers with parameters, in the order of the forward; layers that it does not name follow those before them."""

    layers: tuple[LayerPlan, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError("a plan needs at least one layer")
        sizes = {layer.grid.size for layer in self.layers}
        if len(sizes) > 1:
            raise UsageError(f"the grids of a plan must have the same number of processes, and these have {sorted(sizes)}")
        names = [layer.layer for layer in self.layers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"the plan names a layer twice: {', '.join(sorted(twice))}")

    @property
    def size(self) -> int:
        """Processes of the group."""
        return self.layers[0].grid.size

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def of(self, layer: str) -> LayerPlan | None:
        """The plan of a layer."""
        return next((plan for plan in self.layers if plan.layer == layer), None)

    def values(self) -> list[dict[str, str]]:
        """The plan as JSON values, for `read`."""
        return [
            {"layer": plan.layer, "choice": plan.choice, "grid": str(plan.grid)}
            | ({"strips": plan.strips} if plan.strips != "height" else {})
            for plan in self.layers
        ]

    @classmethod
    def read(cls, values: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan in JSON values: a list of ``{"layer": NAME, "choice": CHOICE, "grid": "PRxPC"}``, and maybe ``"strips"``.

        Raises `UsageError`.
        """
        layers = []
        for number, value in enumerate(values, start=1):
            missing = {"layer", "choice", "grid"} - set(value)
            if missing:
                raise UsageError(f"layer {number} of the plan lacks {', '.join(sorted(missing))}")
            if value["choice"] not in get_args(Choice):
                raise UsageError(
                    f"layer {value['layer']!r} of the plan: {value['choice']!r} is none of {', '.join(get_args(Choice))}"
                )
            grid = Grid.parse(str(value["grid"]))
            layers.append(LayerPlan(str(value["layer"]), cast(Choice, value["choice"]), grid, str(value.get("strips", "height"))))
        return cls(tuple(layers))
