"""``[exchange.gossip]``: what groups exchange, and with which other groups."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zmqtrain.topology.section import Section


class Gossip(Section):
    """Exchange without servers: each step every group sends to one other and receives from one."""

    topology: Literal["dissemination", "hypercube", "random", "ring"] = Field(
        default="dissemination",
        description="Who exchanges with whom. dissemination: groups at distances 1, 2, 4, ... in turn, so that information "
        "reaches all groups within log2 p steps. hypercube: the same in pairs, for a number of groups that is a "
        "power of two. random: any group. ring: always the neighbours.",
    )
    rotation: bool = Field(
        default=True,
        description="Permute the groups after every log2 p steps. All pairs meet within p log2 p steps, whatever the seed. "
        "(Random partners need no rotation, and nothing is promised for them.)",
    )
    balanced: bool = Field(
        default=True,
        description="random: every group receives from exactly one other. false: each group chooses by itself, so that some "
        "receive from several and some from none, and the mean of the groups is not preserved.",
    )
    exchange: Literal["weights", "gradients"] = Field(
        default="weights",
        description="weights: averaged with the partner's after the local update. gradients: averaged before it; the groups' "
        "weights then drift apart without limit.",
    )
    granularity: Literal["bucket", "batch"] = Field(
        default="bucket",
        description="bucket: each bucket is updated and exchanged as soon as backward has computed its gradient. batch: all "
        "buckets after backward.",
    )
    average_evaluations: bool = Field(
        default=False,
        description="Evaluate the exact mean of all groups' models, computed for each evaluation. false: each worker evaluates "
        "its own model on its share of the data. The final model is the mean in either case.",
    )
