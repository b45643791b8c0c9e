"""The small sections: ``[optimizer]``, ``[data]``, ``[engine]`` and ``[observe]``."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from zmqtrain.topology.kubernetes import KubernetesSection
from zmqtrain.topology.ray import RaySection
from zmqtrain.topology.section import MOST, ByteSize, Section, Texts, Timeout, is_plain
from zmqtrain.topology.slurm import SlurmSection


def _momentum(value: Any) -> Any:
    if value in ("auto", "task"):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError('is not a momentum: write "auto", "task", or a number from 0 to below 1')
    return float(value)


class Optimizer(Section):
    """What the job adds to the task's own optimizer."""

    scale_lr: Literal["none", "sqrt", "linear"] = Field(
        default="none",
        description="Multiply the task's learning rates by the number of groups, since a step of all groups takes that many more "
        "samples, or by its square root (Daily et al. 2018).",
    )
    lr: float | None = Field(
        default=None,
        gt=0,
        lt=1e30,
        description="Replaces the task's learning rate and its schedule. With several parameter groups, the others keep their "
        "ratio to the first. Without momentum this is the rate of a single update and is not adapted to the number "
        "of groups (see `look_ahead`).",
    )
    momentum: Annotated[Literal["auto", "task"] | Annotated[float, Field(ge=0, lt=1)], BeforeValidator(_momentum)] = Field(
        default="auto",
        description="auto: the task's momentum (SGD's `momentum`, Adam's first beta) is the total. Where groups meet at model "
        "servers without waiting for each other, it is kept per round of one update from each group, with a learning "
        "rate that fits (with `look_ahead`); without `look_ahead` it is lowered by the implicit momentum of "
        "asynchrony (1 - 1/g for g groups). task: momentum and learning rate exactly as in the task. A number: this "
        "instead of the task's momentum, and the learning rate as it is.",
    )
    look_ahead: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: model servers whose groups do not wait for each other publish the parameters where the momentum will "
        "have taken them by the time a gradient arrives, so that stale gradients do no harm; with `momentum = "
        '"auto"` they adapt momentum and learning rate to it, and limit how fast gradients grow (SGD) or raise the rate '
        "over the first updates of a run (Adam, RMSprop). Where gradients show that steps are too small, the rate rises again, to "
        "no more than the task's own for each group's batch. "
        "Without momentum there is nothing to look ahead to, "
        "but the task's learning rate is still adapted (SGD's is divided by the number of groups). none: none of "
        "this.",
    )
    clip_norm: float = Field(default=0.0, ge=0, lt=1e30, description="Clip the gradient to this norm. 0: no clipping.")

    @property
    def explicit_momentum(self) -> float | None:
        """The momentum that replaces the task's; ``None`` if the task keeps its own."""
        return self.momentum if isinstance(self.momentum, float) else None

    def lr_factor(self, groups: int) -> float:
        """The factor for the task's learning rates with ``groups`` groups."""
        return {"none": 1.0, "sqrt": math.sqrt(groups), "linear": float(groups)}[self.scale_lr]


class Data(Section):
    """The training data."""

    shuffle: Literal["global", "none", "ring"] = Field(
        default="global",
        description="global: a new order of all samples in each epoch, from the seed. none: in the order of the dataset. ring: "
        "each group holds a part of the samples and passes them on to the next group after using them.",
    )
    ring: Literal["indices", "tensors"] = Field(
        default="indices",
        description="ring: what travels. indices: only the knowledge of which group has which samples; every host can read all "
        "data. tensors: the samples themselves; each host reads its own part, once.",
    )
    sample_size: ByteSize | None = Field(
        default=None, description="ring, with modelled devices: the size of a sample on the network."
    )
    path: str | None = Field(
        default=None, min_length=1, description="Where the task finds its data. `--data` and ZMQTRAIN_DATA take precedence."
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not is_plain(value):
            raise ValueError(f"contains {name}, which is not a string, number, boolean, array or table")
    return values


#: Engines whose hosts become known only when the run begins: they join by themselves, or a cluster provides them.
GATHERING = ("environment", "kubernetes", "ray")
#: All engines that come with zmqtrain.
ENGINES = ("local", "ssh", "slurm", *GATHERING)


class EngineSection(Section):
    """What starts the agents."""

    kind: str = Field(
        default="local",
        pattern=r"^[a-z][a-z0-9_.-]{0,63}$",
        description="local: all hosts of the file are sets of processes on this machine. ssh: hosts are machines to log in to. "
        "slurm: hosts are the nodes of the current allocation, or of the one that `--submit` requests. environment: "
        "a scheduler starts `zmqtrain agent` on the hosts, which join by themselves; kubernetes: the same with pods. "
        "ray: Ray provides the machines. Anything else: an engine of that name from an installed package "
        "([engines.md](engines.md)).",
    )
    options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict, description="Settings of an engine from another package; see its documentation."
    )
    wait: Timeout = Field(
        default=600.0,
        description="environment, kubernetes, ray: how long the launcher waits for all hosts to join; machines may have to be "
        "allocated and images fetched first. Agents wait for the launcher as long as ZMQTRAIN_WAIT says, in seconds.",
    )
    client: Literal["auto", "asyncssh", "system"] = Field(
        default="auto",
        description="ssh: how to log in. asyncssh: with the library (`pip install zmqtrain[ssh]`). system: with the `ssh` "
        "command. auto: with the library if it is installed.",
    )
    sync: bool = Field(
        default=False,
        description="ssh, slurm: copy the folder in which you launch to every host, without runs, caches, virtual environments "
        "and git's own files.",
    )
    sync_limit: ByteSize = Field(default=64 * 2**20, description="The most that `sync` copies to a host, before compression.")
    address: str | None = Field(
        default=None,
        pattern=r"^\S{1,255}$",
        description="Not local: IP address or name under which hosts reach the launching machine. Default: the address from which "
        "it reaches each of them.",
    )
    slurm: SlurmSection = Field(default_factory=SlurmSection, description="What `--submit` requests from Slurm.")

    kubernetes: KubernetesSection = Field(
        default_factory=KubernetesSection, description="The pods of a run; `zmqtrain render kubernetes FILE` writes their manifest."
    )

    ray: RaySection = Field(default_factory=RaySection, description="What a run requests from a Ray cluster.")

    @property
    def gathers(self) -> bool:
        """Whether the hosts become known only when the run begins."""
        return self.kind in GATHERING

    @property
    def starts_agents(self) -> bool:
        """Whether the launcher starts the agents, and can do so again; else a cluster or a person does."""
        return self.kind not in ("environment", "kubernetes")


_SINK = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class Observe(Section):
    """What is recorded and shown."""

    trace_steps: int = Field(default=20, ge=0, le=MOST, description="Steps of each worker to record in `trace.json`.")
    progress_every: int = Field(default=0, ge=0, le=MOST, description="Steps between progress lines. 0: about one line a second.")
    events_per_s: Annotated[int, Field(ge=0, le=MOST)] | Literal["all"] = Field(
        default=5,
        description="How many events of a kind `events.jsonl` lists one by one, for each role and second, after the first 200; of "
        "more it has the sums ([events.md](events.md)). all: every event, in any number.",
    )
    to: Texts = Field(
        default=(),
        description="Where figures go besides the run directory: `tensorboard`, `prometheus`, `mlflow`, `wandb`, `csv`, or a sink "
        "of that name from an installed package ([observe.md](observe.md)).",
    )
    options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default_factory=dict,
        description="A table of settings for each of these that needs any, such as `prometheus = { port = 9000 }` "
        "([observe.md](observe.md)).",
    )

    @property
    def most_single_events(self) -> int | None:
        """`events_per_s` as a number; ``None``: any number."""
        return None if self.events_per_s == "all" else self.events_per_s

    @model_validator(mode="after")
    def _options_of_sinks(self) -> Observe:
        for name in self.to:
            if not _SINK.fullmatch(name) or self.to.count(name) > 1:
                raise ValueError(f"to: {name!r} is {'named twice' if _SINK.fullmatch(name) else 'no name of a sink'}")
        for name, table in self.options.items():
            if name not in self.to:
                raise ValueError(f'options: {name} is not among the sinks of this run: add it to [observe] to, as to = ["{name}"]')
            if not isinstance(table, dict):
                raise ValueError(f"options: {name} must be a table of settings, such as {name} = {{ key = value }}")
        return self
