"""``[engine.ray]``: what a run asks a Ray cluster for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zmqtrain.topology.section import Section


class RaySection(Section):
    """What a run asks a Ray cluster for. Each host is a bundle of a placement group: `slots` processors, and a GPU for each of its
    `devices`."""

    address: str | None = Field(
        default=None,
        pattern=r"^\S{1,255}$",
        description="The cluster, like `10.0.0.1:6379`, or `auto`: the one that this machine is part of. Left out: as RAY_ADDRESS "
        "says, else a new one on this machine.",
    )
    nodes: int = Field(default=1, ge=1, le=65_536, description="How many hosts, where `[[hosts]]` lists none.")
    cpus: int | None = Field(
        default=None, ge=1, le=4096, description="Processors of each then. Left out: one for each thread of the workers."
    )
    gpus: int = Field(default=0, ge=0, le=1024, description="GPUs of each then.")
    spread: Literal["strict", "soft"] = Field(
        default="strict",
        description="strict: each host is another node of the cluster. soft: where there are enough (not with fewer nodes).",
    )
