"""The small sections: ``[optimizer]``, ``[data]``, ``[engine]`` and ``[observe]``."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from zmqtrain.topology.kubernetes import KubernetesSection
from zmqtrain.topology.ray import RaySection
from zmqtrain.topology.section import MOST, ByteSize, Section, Timeout, is_plain
from zmqtrain.topology.slurm import SlurmSection


def _momentum(value: Any) -> Any:
    if value in ("auto", "task"):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError('is no momentum: write "auto", "task", or a number from 0 to below 1')
    return float(value)


class Optimizer(Section):
    """What the job adds to the task's own optimizer."""

    scale_lr: Literal["none", "sqrt", "linear"] = Field(
        default="none",
        description="Multiply the task's learning rates by the square root of the number of groups (Daily et al. 2018), or by the "
        "number itself, since a step of all takes so many more samples.",
    )
    lr: float | None = Field(
        default=None,
        gt=0,
        lt=1e30,
        description="Replaces the task's learning rate, and its schedule. Of several parameter groups the others keep their ratios "
        "to the first. Without momentum it is each update's, and not fitted (`look_ahead`).",
    )
    momentum: Annotated[Literal["auto", "task"] | Annotated[float, Field(ge=0, lt=1)], BeforeValidator(_momentum)] = Field(
        default="auto",
        description="auto: the task names the momentum in all (SGD's `momentum`, Adam's first beta); where groups meet at model "
        "servers without waiting for each other, the optimizer's own is such that an update of each group has it, and the learning "
        "rate fits (with `look_ahead`), or it is lowered by what asynchrony acts like (1 - 1/g for g groups). task: momentum and "
        "rate as the task has them. A number: this, instead of the task's, and the rate as it is.",
    )
    look_ahead: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: model servers whose groups do not wait for each other keep the parameters where the momentum will have "
        'taken them when a gradient of them arrives, so that old gradients do no harm; with `momentum = "auto"` they fit '
        "momentum and learning rate to that, and let the rate rise in the first updates of a run. Without momentum nothing is "
        "looked ahead, but a learning rate of the task's is fitted (SGD's is divided by the number of groups). none: none of this.",
    )
    clip_norm: float = Field(default=0.0, ge=0, lt=1e30, description="Clip the gradient to this norm; 0: do not.")

    @property
    def explicit_momentum(self) -> float | None:
        """What replaces the task's; none: it keeps its own."""
        return self.momentum if isinstance(self.momentum, float) else None

    def lr_factor(self, groups: int) -> float:
        """By what learning rates are multiplied among so many groups."""
        return {"none": 1.0, "sqrt": math.sqrt(groups), "linear": float(groups)}[self.scale_lr]


class Data(Section):
    """The training data."""

    shuffle: Literal["global", "none", "ring"] = Field(
        default="global",
        description="global: a new order of all samples each epoch, from the seed. none: as they lie. ring: each group has a part, "
        "whose samples go on to the next group when they are used.",
    )
    ring: Literal["indices", "tensors"] = Field(
        default="indices",
        description="ring: what travels. indices: nothing but the knowledge of which samples are whose; every host can read the "
        "data. tensors: the samples themselves; a host reads its own part, once.",
    )
    sample_size: ByteSize | None = Field(
        default=None, description="ring, with modelled devices: how much a sample takes on the network."
    )
    path: str | None = Field(
        default=None, min_length=1, description="Where the task finds its data; `--data` and ZMQTRAIN_DATA go before this."
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not is_plain(value):
            raise ValueError(f"holds {name}, which is no text, number, boolean, array or table of such")
    return values


#: Engines whose hosts are known when the run begins only: they come by themselves, or somebody gives them.
GATHERING = ("environment", "kubernetes", "ray")


class EngineSection(Section):
    """What starts the agents."""

    kind: str = Field(
        default="local",
        pattern=r"^[a-z][a-z0-9_.-]{0,63}$",
        description="local: all hosts of the file are process sets on this machine. ssh: they are machines to log in to. slurm: "
        "they are the nodes of the allocation that one launches in, or that `--submit` asks for. environment: a scheduler starts "
        "`zmqtrain agent` on them, which come by themselves; kubernetes: so do its pods. ray: Ray gives the machines. Any other: "
        "the engine of that name that a package brings ([engines.md](engines.md)).",
    )
    options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict, description="Settings of an engine that a package brings: see there."
    )
    wait: Timeout = Field(
        default=600.0,
        description="environment, kubernetes, ray: how long the launcher waits until all hosts are there, which may have to be "
        "bought, or their images fetched. Agents wait for the launcher as long as ZMQTRAIN_WAIT says, in seconds.",
    )
    client: Literal["auto", "asyncssh", "system"] = Field(
        default="auto",
        description="ssh: what logs in. asyncssh: the library (`pip install zmqtrain[ssh]`). system: the `ssh` command. auto: the "
        "library where it is installed.",
    )
    sync: bool = Field(
        default=False,
        description="ssh, slurm: copy the folder that one launches in to every host, but for runs, caches, virtual environments "
        "and what git keeps for itself.",
    )
    sync_limit: ByteSize = Field(default=64 * 2**20, description="The most that `sync` copies to a host, before compression.")
    address: str | None = Field(
        default=None,
        pattern=r"^\S{1,255}$",
        description="ssh, slurm: IP address or name under which hosts reach the machine that launches. Left out: the one by which "
        "it reaches each of them.",
    )
    slurm: SlurmSection = Field(default_factory=SlurmSection, description="What `--submit` asks Slurm for.")

    kubernetes: KubernetesSection = Field(
        default_factory=KubernetesSection, description="What the pods of a run are: `zmqtrain render kubernetes FILE` writes them."
    )

    ray: RaySection = Field(default_factory=RaySection, description="What a run asks a Ray cluster for.")

    @property
    def gathers(self) -> bool:
        """Whether the hosts become known when the run begins only."""
        return self.kind in GATHERING


class Observe(Section):
    """What is recorded and shown."""

    trace_steps: int = Field(default=20, ge=0, le=MOST, description="Steps of each worker that go into `trace.json`.")
    progress_every: int = Field(default=0, ge=0, le=MOST, description="Steps between progress lines; 0: about one a second.")
