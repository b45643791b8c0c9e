"""The description of the run that the coordinator gives to each member that joins: the topology, the placement, and the options of
the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqtrain.errors import ProtocolError
from zmqtrain.membership.client import COORDINATOR
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
    """The folder that relative paths in the topology file begin at."""
    data_path: str | None = None
    resume: str | None = None
    script: tuple[str, ...] = ()
    """A script of the user's own that workers run, and its arguments; empty where the topology names a task."""

    def to_value(self) -> Value:
        return {
            "topology": self.topology.to_dict(),
            "placement": self.placement.to_dict(),
            "folder": self.folder,
            "data_path": self.data_path,
            "resume": self.resume,
            "script": list(self.script),
        }

    @classmethod
    def from_value(cls, value: Any) -> RunDescription:
        """Raises `ProtocolError` for anything else than `to_value` gives."""
        try:
            return cls(
                topology=Topology.from_dict(value["topology"]),
                placement=Placement.from_dict(value["placement"]),
                folder=value["folder"],
                data_path=value["data_path"],
                resume=value["resume"],
                script=tuple(value["script"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the coordinator describes the run in a way that this release does not know: {error!r}") from error


def serve_description(endpoint: Endpoint, description: RunDescription) -> None:
    """Answer everybody who asks what the run is."""
    value = description.to_value()

    async def answer(_caller: PeerId) -> Value:
        return value

    endpoint.serve(_METHOD, answer)


async def fetch_description(endpoint: Endpoint, *, timeout: float) -> RunDescription:
    """What the run is. The endpoint must know the coordinator's address. Raises `ConnectivityError` and `ProtocolError`."""
    return RunDescription.from_value((await endpoint.request(COORDINATOR, _METHOD, timeout=timeout)).meta)
