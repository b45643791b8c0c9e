"""``[parallel]``: how a model is divided over the rows of ``[compute] grid``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zmqtrain.topology.compute import GRID, rows_and_columns
from zmqtrain.topology.section import Section, Texts, _tuple


class LayerChoice(Section):
    """How one layer is divided."""

    layer: str = Field(min_length=1, description="The layer's name in the model, such as `features.3`.")
    choice: Literal["model", "domain", "batch", "whole"] = Field(
        description="model: outputs are divided over the rows. domain: the height of the images is divided over the rows. batch: "
        "samples are divided over all workers. whole: every worker of a column computes the whole layer."
    )
    grid: Annotated[str, Field(pattern=GRID)] = Field(
        description="Pr x Pc, such as `2x4`; the product is the group's number of workers."
    )


class Parallel(Section):
    """Model and domain parallelism inside a group."""

    plan: str | None = Field(
        default=None,
        min_length=1,
        description="A JSON file that says how each layer is divided, as written by `zmqtrain plan --save`.",
    )
    layers: Annotated[tuple[LayerChoice, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="The same, in this file. A layer that is not listed is divided like the one before it."
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

    def sizes(self) -> set[int]:
        """The numbers of workers that the layers' grids have."""
        return {rows * columns for rows, columns in (rows_and_columns(each.grid) for each in self.layers)}
