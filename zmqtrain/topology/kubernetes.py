"""``[engine.kubernetes]``: the pods of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from zmqtrain.topology import units
from zmqtrain.topology.section import Section, Written

_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
#: Limits for a pod's memory.
PodMemory = Annotated[
    int, BeforeValidator(units.size(2**20, 2**50)), PlainSerializer(units.format_size), Written(("16 GiB", "800 MiB"))
]


class KubernetesSection(Section):
    """The pods of a run: `zmqtrain render kubernetes FILE` writes their manifest."""

    image: str | None = Field(
        default=None,
        pattern=r"^\S{1,512}$",
        description="The container image, with zmqtrain, torch and the task. Required for Kubernetes.",
    )
    namespace: str | None = Field(
        default=None,
        pattern=_NAME,
        description="Namespace of the run. Default: the current namespace when the manifest is applied.",
    )
    folder: str = Field(
        default="/workspace",
        pattern=r"^/\S*$",
        description="The folder in the image that contains the task, and to which relative paths refer.",
    )
    claim: str | None = Field(
        default=None,
        pattern=_NAME,
        description="A persistent volume claim for the launcher's run directory. With it, a restarted run continues from its "
        "last checkpoint; without it, the run starts over.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How many times the whole run is restarted after a failure that may be temporary.",
    )
    memory: PodMemory | None = Field(default=None, description="Memory of each pod except the launcher's. Default: no limit.")
    shared_memory: PodMemory = Field(
        default=1024**3,
        description="Size of `/dev/shm` in each pod, for data loaders with processes of their own (`Task.num_workers`).",
    )
