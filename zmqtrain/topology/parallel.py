"""``[parallel]``: how a model is divided over the rows of ``[compute] grid``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zmqtrain.topology.compute import GRID, rows_and_columns
from zmqtrain.topology.main_grid import divides
from zmqtrain.topology.section import Section, Texts, _tuple

#: How images are divided.
STRIPS = r"^(height|width|[1-9]\d{0,3}x[1-9]\d{0,3})$"


class LayerChoice(Section):
    """How one layer is divided."""

    layer: str = Field(min_length=1, description="The layer's name in the model, such as `features.3`.")
    choice: Literal["model", "domain", "batch", "whole"] = Field(
        description="model: outputs are divided over the rows. domain: images are divided over the rows, as strips says. batch: "
        "samples are divided over all workers. whole: every worker of a column computes the whole layer."
    )
    grid: Annotated[str, Field(pattern=GRID)] = Field(
        description="Pr x Pc, such as `2x4`; the product is the group's number of workers."
    )
    strips: Annotated[str, Field(pattern=STRIPS)] = Field(
        default="height",
        description="choice = domain: how images are divided over the rows: by their `height`, by their `width`, or by both, "
        "such as `2x4` for 2 parts of the height by 4 of the width, whose product is Pr.",
    )


class Parallel(Section):
    """Model and domain parallelism inside a group."""

    plan: str | None = Field(
        default=None,
        min_length=1,
        description="A JSON file that says how each layer is divided, as written by `zmqtrain plan --save`.",
    )
    layers: Annotated[tuple[LayerChoice, ...], BeforeValidator(_tuple)] = Field(
        default=(),
        description="How each layer is divided, in this file instead of `plan`. A layer that is not listed is divided "
        "like the one before it.",
    )
    whole: Texts = Field(default=(), description="Names of modules that are computed whole; their forward is not examined.")
    statistics: Literal["whole", "local"] | None = Field(
        default=None,
        description="Statistics of batch norm. whole: over the group's whole batch, as in one process. local: over each worker's "
        "part of it. Default: whole if the model is divided, otherwise local.",
    )
    strict: bool = Field(
        default=False, description="Whether a layer that cannot be divided as planned ends the run; otherwise it is computed whole."
    )
    verify: bool = Field(
        default=True,
        description="Whether the divided model is compared with the ordinary one before the first step, on a few samples: outputs, "
        "loss, gradients, buffers, and the optimizer's step. A difference ends the run.",
    )

    @property
    def main_grid(self) -> str | None:
        """The grid of the first layer that rows divide, whose columns say which samples each worker has; ``None`` if there is
        none."""
        divided = (each.grid for each in self.layers if divides(each.choice, rows_and_columns(each.grid)[0]))
        return next(divided, None)

    def sizes(self) -> set[int]:
        """The group sizes that the grids of the layers ask for."""
        return {rows * columns for rows, columns in (rows_and_columns(each.grid) for each in self.layers)}
