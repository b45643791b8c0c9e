"""``[simulation]`` and ``[[faults]]``: what a simulated run needs besides the job, and an emulated one may have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, SerializerFunctionWrapHandler, model_serializer

from zmqtrain.topology import units
from zmqtrain.topology.network import HostNames
from zmqtrain.topology.section import MOST, Section, Written, _tuple

#: Virtual time: up to a hundred days.
VirtualTime = Annotated[
    float, BeforeValidator(units.duration(0, 8.64e6)), PlainSerializer(units.format_duration), Written(("2 s", "1 h"))
]


#: Which fields each kind of fault takes: first those that must be given, then those that may be.
NEEDED: dict[str, tuple[str, ...]] = {
    "kill": ("target",),
    "restart": ("target",),
    "pause": ("target", "lasts"),
    "partition": ("sides",),
    "heal": (),
    "slow": ("target",),
    "delay": ("target",),
    "corrupt": ("target",),
    "drop": ("target",),
    "drain": ("target",),
}
ALLOWED: dict[str, tuple[str, ...]] = {
    "restart": ("lasts",),
    "partition": ("one_way", "lasts"),
    "slow": ("factor", "lasts"),
    "delay": ("factor", "lasts"),
    "corrupt": ("to",),
    "drop": ("to",),
}
DETAILS = ("target", "to", "sides", "one_way", "factor", "lasts")


def _sides(value: Any) -> Any:
    return tuple(_tuple(side) for side in value) if isinstance(value, list) else value


class Fault(Section):
    """A fault that is injected into a simulated or an emulated run."""

    at: VirtualTime | None = Field(
        default=None, description="When: time since the start of the run; of an emulated one, since all have joined."
    )
    step: int | None = Field(
        default=None,
        ge=0,
        le=MOST,
        description="Or the step that the target is about to begin (worker 0's, if the target is not a worker).",
    )
    kind: Literal["kill", "restart", "pause", "partition", "heal", "slow", "delay", "corrupt", "drop", "drain"] = Field(
        description="kill: the target dies without notice. restart: it dies, and a new process takes its name. pause: "
        "it stops for a while. partition: sets of hosts cannot reach each other. heal: all partitions end. slow: "
        "modelled compute takes `factor` times as long. delay: what it sends takes `factor` times the latency. corrupt: a "
        "bit of the next message flips. drop: connections break, lose what is in flight, and come back. drain: the host is "
        "asked to leave, as `zmqtrain drain` does; if the run cannot continue without it, it stays. Emulated runs have no "
        "corrupt and drop, and slow needs modelled devices."
    )
    target: str | None = Field(
        default=None,
        min_length=1,
        description="A role such as `worker/1` or `server/0`, or a host, which stands for all its processes.",
    )
    to: str | None = Field(default=None, min_length=1, description="corrupt, drop: only traffic between the target and this role.")
    sides: Annotated[tuple[HostNames, ...], BeforeValidator(_sides)] = Field(
        default=(), description='partition: the sets of hosts, such as `[["alpha"], ["beta", "gamma"]]`.'
    )
    one_way: bool = Field(default=False, description="partition: only what the first side sends is lost.")
    factor: float = Field(default=2.0, ge=0.001, le=1e6, description="slow, delay: how many times as long.")
    lasts: VirtualTime | None = Field(
        default=None,
        description="pause, partition, slow, delay: duration. restart: time until the new process starts. Default: for ever "
        "(restart: 1 s).",
    )

    @property
    def meaningful(self) -> tuple[str, ...]:
        """The fields of `DETAILS` that apply to a fault of this kind."""
        return (*NEEDED[self.kind], *ALLOWED.get(self.kind, ()))

    @model_serializer(mode="wrap")
    def _meaningful_only(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name not in DETAILS or name in self.meaningful}


class Simulation(Section):
    """How `zmqtrain simulate` runs the job."""

    payload: Literal["phantom", "small", "real"] | None = Field(
        default=None,
        description="phantom: only sizes travel. small: a few numbers per layer travel and are checked at the end. real: "
        "everything travels; a job with a task is really trained, in the time that the profile gives. Default: real "
        "for a task, phantom for a modelled device.",
    )
    time_limit: VirtualTime = Field(default=86_400.0, description="Virtual time after which an unfinished run is abandoned.")
