"""``[engine.ray]``: what a run requests from a Ray cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zmqtrain.topology.section import Section


class RaySection(Section):
    """What a run requests from a Ray cluster. Each host is a bundle of a placement group: `slots` processors, and a GPU for each
    of its `devices`."""

    address: str | None = Field(
        default=None,
        pattern=r"^\S{1,255}$",
        description="The cluster: an address such as `10.0.0.1:6379`, or `auto` for the one that this machine is part of. "
        "Default: RAY_ADDRESS, or else a new cluster on this machine.",
    )
    nodes: int = Field(default=1, ge=1, le=65_536, description="Number of hosts, if the file has no `[[hosts]]`.")
    cpus: int | None = Field(
        default=None, ge=1, le=4096, description="Processors of each of these hosts. Default: one for each thread of the workers."
    )
    gpus: int = Field(default=0, ge=0, le=1024, description="GPUs of each of these hosts.")
    spread: Literal["strict", "soft"] = Field(
        default="strict",
        description="strict: each host is a different node of the cluster. soft: preferably; with fewer nodes, hosts share them.",
    )
