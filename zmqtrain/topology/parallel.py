"""``[parallel]``: how a model is divided over the rows of ``[compute] grid``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zmqtrain.topology.compute import GRID, rows_and_columns
from zmqtrain.topology.section import Section, Texts, _tuple


class LayerChoice(Section):
    """How one layer is divided."""

    layer: str = Field(min_length=1, description="Its name in the model, like `features.3`.")
    choice: Literal["model", "domain", "batch", "whole"] = Field(
        description="model: its outputs over the rows. domain: the height of its images over the rows. batch: samples over all "
        "workers. whole: every worker of a column computes all of it."
    )
    grid: Annotated[str, Field(pattern=GRID)] = Field(description="Pr x Pc, like `2x4`, of as many workers as the group has.")


class Parallel(Section):
    """Model and domain parallelism inside a group."""

    plan: str | None = Field(
        default=None,
        min_length=1,
        description="A JSON file that says how each layer is divided, as `zmqtrain plan --save` writes it.",
    )
    layers: Annotated[tuple[LayerChoice, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="The same, here. Layers that are not named follow those before them."
    )
    whole: Texts = Field(default=(), description="Names of modules that are left whole, and whose forward is not looked into.")
    statistics: Literal["whole", "local"] | None = Field(
        default=None,
        description="Batch norm's: `whole`, of the group's whole batch, as one process has them, or `local`, of what each worker "
        "has of it. Left out: whole where the model is divided, else local.",
    )
    strict: bool = Field(
        default=False, description="Whether a layer that cannot be divided as planned ends the run; otherwise it is left whole."
    )

    def sizes(self) -> set[int]:
        """The numbers of workers that the layers' grids have."""
        return {rows * columns for rows, columns in (rows_and_columns(each.grid) for each in self.layers)}
