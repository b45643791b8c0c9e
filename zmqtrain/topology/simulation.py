"""``[simulation]`` and ``[[faults]]``: what a simulated world adds to a job."""

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


#: Which of a fault's fields say something about which kind: first those that must be given, then those that may be.
NEEDED: dict[str, tuple[str, ...]] = {
    "kill": ("target",),
    "restart": ("target",),
    "pause": ("target", "lasts"),
    "partition": ("sides",),
    "heal": (),
    "slow": ("target",),
    "corrupt": ("target",),
    "drop": ("target",),
}
ALLOWED: dict[str, tuple[str, ...]] = {
    "restart": ("lasts",),
    "partition": ("one_way", "lasts"),
    "slow": ("factor", "lasts"),
    "corrupt": ("to",),
    "drop": ("to",),
}
DETAILS = ("target", "to", "sides", "one_way", "factor", "lasts")


def _sides(value: Any) -> Any:
    return tuple(_tuple(side) for side in value) if isinstance(value, list) else value


class Fault(Section):
    """Something that goes wrong in a simulated run."""

    at: VirtualTime | None = Field(default=None, description="When: virtual time since the run began.")
    step: int | None = Field(
        default=None, ge=0, le=MOST, description="Or when the target begins this step (worker 0, where the target is no worker)."
    )
    kind: Literal["kill", "restart", "pause", "partition", "heal", "slow", "corrupt", "drop"] = Field(
        description="kill: dies without a word. restart: dies, and another process comes in its name. pause: stands still for a "
        "while. partition: hosts cannot reach each other; heal: all partitions end. slow: modelled compute takes `factor` times as "
        "long. corrupt: a bit of the next message flips. drop: connections break, with what is on them, and come back."
    )
    target: str | None = Field(
        default=None, min_length=1, description="A role, like `worker/1` or `server/0`, or a host: all its processes."
    )
    to: str | None = Field(
        default=None, min_length=1, description="corrupt, drop: only what goes between the target and this role."
    )
    sides: Annotated[tuple[HostNames, ...], BeforeValidator(_sides)] = Field(
        default=(), description='partition: sets of hosts, like `[["alpha"], ["beta", "gamma"]]`.'
    )
    one_way: bool = Field(default=False, description="partition: only what the first side sends is lost.")
    factor: float = Field(default=2.0, ge=0.001, le=1e6, description="slow: how many times as long.")
    lasts: VirtualTime | None = Field(
        default=None,
        description="pause, partition, slow: until it is over by itself. restart: until the new process comes. Left out: for ever "
        "(restart: 1 s).",
    )

    @property
    def meaningful(self) -> tuple[str, ...]:
        """Which of its `DETAILS` say something about a fault of this kind."""
        return (*NEEDED[self.kind], *ALLOWED.get(self.kind, ()))

    @model_serializer(mode="wrap")
    def _meaningful_only(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name not in DETAILS or name in self.meaningful}


class Simulation(Section):
    """How `zmqtrain simulate` runs the job."""

    payload: Literal["phantom", "small", "real"] | None = Field(
        default=None,
        description="phantom: only sizes travel. small: a few numbers a layer travel, and are checked at the end. real: all; "
        "where the job has a task it is trained, in the time that the profile gives. Default: real for a task, phantom for a "
        "modelled device.",
    )
    time_limit: VirtualTime = Field(default=86_400.0, description="Virtual time after which a run that is not through is given up.")
