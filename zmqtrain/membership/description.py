"""The description of the run that the coordinator gives to each member that joins: the topology, the placement, and the options of
the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqtrain.errors import ProtocolError, UsageError
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.wire.payload import Value

_METHOD = "run.description"


@dataclass(frozen=True, slots=True)
class RunDescription:
    """The run as its launcher sees it."""

    topology: Topology
    placement: Placement
    folder: str
    """The folder at which relative paths in the topology file begin."""
    data_path: str | None = None
    resume: str | None = None
    script: tuple[str, ...] = ()
    """The user's script that workers run, and its arguments; empty if the topology names a task."""
    alone_s: float = 0.0
    """For how many seconds the members train on without a coordinator; 0: they end with it."""

    def __post_init__(self) -> None:
        if self.topology.undecided and (self.topology.job.task is not None or self.topology.compute.device == "modelled"):
            # A session says in its own words why a script cannot leave anything open.
            raise UsageError(
                'a run needs a job in which all is decided: name a grid in place of grid = "auto", a way in place of compression = '
                '"auto", and the layers of the [parallel] plan (the commands launch and simulate decide these themselves)'
            )

    def to_value(self) -> Value:
        return {
            "topology": self.topology.to_dict(),
            "placement": self.placement.to_dict(),
            "folder": self.folder,
            "data_path": self.data_path,
            "resume": self.resume,
            "script": list(self.script),
            "alone_s": self.alone_s,
        }

    @classmethod
    def from_value(cls, value: Any) -> RunDescription:
        """The description that `to_value` wrote. Raises `ProtocolError` for anything else."""
        try:
            return cls(
                topology=Topology.from_dict(value["topology"]),
                placement=Placement.from_dict(value["placement"]),
                folder=value["folder"],
                data_path=value["data_path"],
                resume=value["resume"],
                script=tuple(value["script"]),
                alone_s=float(value["alone_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the coordinator's description of the run cannot be read by this release: {error!r}") from error


def serve_description(endpoint: Endpoint, description: RunDescription) -> None:
    """Serve the description of the run to all members."""
    value = description.to_value()

    async def answer(_caller: PeerId) -> Value:
        return value

    endpoint.serve(_METHOD, answer)


async def fetch_description(endpoint: Endpoint, *, timeout: float) -> RunDescription:
    """Get the description of the run. The endpoint must know the coordinator's address. Raises `ConnectivityError` and
    `ProtocolError`."""
    return RunDescription.from_value((await endpoint.request(COORDINATOR, _METHOD, timeout=timeout)).meta)
