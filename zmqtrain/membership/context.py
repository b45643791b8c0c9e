"""Everything that a role is given. A role opens nothing itself, so that it runs in anybody's event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zmqtrain.arena.arena import Arena
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.membership.client import Membership
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.topology.placement import Placement, RolePlacement
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts

if TYPE_CHECKING:
    from zmqtrain.host.member import MakeMember
    from zmqtrain.train.device.base import Device


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Everything that a worker or server is given. The caller that made the endpoint closes it after the role has returned."""

    endpoint: Endpoint
    membership: Membership
    role: RolePlacement
    placement: Placement
    topology: Topology
    timeouts: Timeouts
    recorder: Recorder = field(default_factory=NullRecorder)
    data_path: str | None = None
    """Where the task finds its data: what the person said, else what the topology says."""
    resume: str | None = None
    """The checkpoint to go on from: a folder or ``latest``; ``None`` to begin anew."""
    arena: Arena | None = None
    """The memory that the processes of this host share; ``None`` where they share none, and everything goes over the network."""
    make_member: MakeMember | None = None
    """Makes a worker's place among those of its host that sum gradients in simulated memory; ``None``: it is in `arena`."""
    slowdown: Callable[[], float] = lambda: 1.0
    """How many times as long a modelled device takes for work that begins now (a simulated host may be slow for a while)."""
    make_device: Callable[[RolePlacement], Device] | None = None
    """Makes the device of a worker that computes with torch; ``None``: the one that its placement names."""

    @property
    def modelled(self) -> bool:
        """Whether this role only takes the time that computing would: it has no task, and needs no torch."""
        return self.role.device == "modelled" and self.make_device is None and not self.topology.trains
