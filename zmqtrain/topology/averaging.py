"""``[exchange.averaging]``: how groups that train alone come together again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zmqtrain.topology.section import MOST, Section


class Averaging(Section):
    """What happens every `every` steps, with ``kind = "averaging"``."""

    method: Literal["average", "elastic", "outer"] = Field(
        default="average",
        description="average: all take the mean of their models (local SGD). elastic: all are drawn towards a center, and it "
        "towards them (EASGD). outer: the mean of what they changed is the gradient of an outer optimizer (DiLoCo).",
    )
    alpha: float | None = Field(
        default=None, gt=0, le=1, description="elastic: how far each is drawn. Default: 0.9 divided by the number of groups."
    )
    outer_lr: float = Field(default=0.7, gt=0, le=100, description="outer: learning rate of the outer optimizer.")
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="outer: its Nesterov momentum; 0: plain SGD.")
    deltas: Literal["float32", "fp16", "int8"] = Field(
        default="float32",
        description="outer: what travels of the changes. float32: as they are. fp16, int8: rounded; what is lost goes into the "
        "next.",
    )
    fragments: int = Field(
        default=1, ge=1, le=65536, description="Parts of the model that take turns, spread over the `every` steps."
    )
    overlap_steps: int = Field(
        default=0, ge=0, le=MOST, description="Steps that go on while a part is exchanged; it is then applied. 0: wait for it."
    )
    mix: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="With overlap_steps: how much of its own model a group keeps when it applies what was exchanged.",
    )
