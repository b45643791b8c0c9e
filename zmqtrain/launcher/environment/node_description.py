"""How a node describes itself when it joins. Pure, except `own_description`, which examines this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zmqtrain.errors import ProtocolError
from zmqtrain.launcher.environment.place import NodePlace
from zmqtrain.launcher.ssh.inspection import own_versions
from zmqtrain.processors import processors

#: The longest text in a description.
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A node, as it describes itself."""

    names: tuple[str, ...] = ()
    rank: int | None = None
    nodes: int | None = None
    address: str | None = None
    """The address at which others reach it, if it was told one."""
    bind: str | None = None
    interface: str = "127.0.0.1"
    """Its own address on the route to the launcher."""
    launcher: str = "127.0.0.1"
    """The name or address by which it has reached the launcher."""
    slots: int = 1
    """Processors that it may use."""
    machine: str = ""
    """The machine's host name."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        known = self.names[0] if self.names else None if self.rank is None else f"node {self.rank}"
        where = self.machine or self.interface
        return where if known in (None, where) else f"{known} ({where})"

    def to_value(self) -> dict[str, Any]:
        """The description as plain values; `from_value` restores it."""
        return asdict(self) | {"names": list(self.names), "versions": dict(self.versions)}

    @classmethod
    def from_value(cls, value: Any) -> NodeDescription:
        """The description that `to_value` wrote. Raises `ProtocolError` for anything else."""
        match value:
            case {
                "names": [*names],
                "rank": int() | None as rank,
                "nodes": int() | None as nodes,
                "address": str() | None as address,
                "bind": str() | None as bind,
                "interface": str(interface),
                "launcher": str(launcher),
                "slots": int(slots),
                "machine": str(machine),
                "versions": dict(versions),
            } if all(isinstance(text, str) for text in (*names, *versions.values())):
                texts = (*names, address or "", bind or "", interface, launcher, machine)
                numbers = (number for number in (rank, nodes, slots) if number is not None)
                if all(len(text) <= _LONGEST for text in texts) and all(0 <= number < 2**31 for number in numbers) and slots:
                    return cls(tuple(names), rank, nodes, address, bind, interface, launcher, slots, machine, versions)
        raise ProtocolError("a node sent a description that this release does not understand")


def own_description(place: NodePlace, interface: str, launcher: str) -> NodeDescription:
    """The description of this node."""
    return NodeDescription(
        place.names,
        place.rank,
        place.nodes,
        place.address,
        place.bind,
        interface,
        launcher,
        processors(),
        socket.gethostname(),
        own_versions(),
    )
