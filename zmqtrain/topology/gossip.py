"""``[exchange.gossip]``: what peers exchange, and with whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zmqtrain.topology.section import Section


class Gossip(Section):
    """Exchange without servers: each step every group sends to one other and receives from one."""

    topology: Literal["dissemination", "hypercube", "random", "ring"] = Field(
        default="dissemination",
        description="Who talks to whom. dissemination: at distances 1, 2, 4, ... in turn, so that all have heard of all in log2 p "
        "steps. hypercube: the same in pairs, for a power of two. random: anybody. ring: always the neighbours.",
    )
    rotation: bool = Field(
        default=True,
        description="Put the groups in another order after every log2 p steps. All pairs meet within p log2 p steps, whatever the "
        "seed. (Random partners need no rotation, and promise nothing.)",
    )
    balanced: bool = Field(
        default=True,
        description="random: everybody receives from exactly one. false: each group chooses for itself, so that some receive from "
        "several and some from none, and the groups' mean is not kept.",
    )
    exchange: Literal["weights", "gradients"] = Field(
        default="weights",
        description="weights: after the local update, averaged with the partner's. gradients: before it; the groups' weights drift "
        "apart for ever.",
    )
    granularity: Literal["bucket", "batch"] = Field(
        default="bucket",
        description="bucket: each bucket is updated and exchanged as soon as backward has its gradient. batch: all of them after "
        "backward.",
    )
    average_evaluations: bool = Field(
        default=False,
        description="Evaluate the exact average of all groups' models, made for the occasion. false: each worker evaluates its own "
        "on its share of the data. The final model is always the average.",
    )
