"""``[exchange.averaging]``: how groups that train independently combine their models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zmqtrain.topology.section import MOST, Section


class Averaging(Section):
    """How groups average their models every `every` steps, with ``kind = "averaging"``."""

    method: Literal["average", "elastic", "outer"] = Field(
        default="average",
        description="average: all groups take the mean of their models (local SGD). elastic: every model is pulled towards a "
        "common center, and the center towards the models (EASGD). outer: the mean of the models' changes is the "
        "gradient of an outer optimizer (DiLoCo).",
    )
    alpha: float | None = Field(
        default=None, gt=0, le=1, description="elastic: how far each model is pulled. Default: 0.9 divided by the number of groups."
    )
    outer_lr: float = Field(default=0.7, gt=0, le=100, description="outer: learning rate of the outer optimizer.")
    outer_momentum: float = Field(
        default=0.9, ge=0, lt=1, description="outer: Nesterov momentum of the outer optimizer. 0: plain SGD."
    )
    deltas: Literal["float32", "fp16", "int8"] = Field(
        default="float32",
        description="outer: the type in which changes travel. float32: unchanged. fp16, int8: rounded; the rounding error is "
        "added to the next change.",
    )
    fragments: int = Field(
        default=1,
        ge=1,
        le=65536,
        description="Number of parts of the model that are averaged in turn, spread over the `every` steps.",
    )
    overlap_steps: int = Field(
        default=0,
        ge=0,
        le=MOST,
        description="Steps that continue while a part is exchanged; the result is applied after them. 0: wait for it.",
    )
    mix: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="With `overlap_steps`: the weight of a group's own model when it applies the result of the exchange.",
    )
