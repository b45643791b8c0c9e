"""Everything that a role is given. A role opens no connection itself, so that it runs in any event loop."""

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
    from zmqtrain.exchange.grid_era import GridEra
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
    """Where the task finds its data: the launch option, or else the topology's setting."""
    resume: str | None = None
    """The checkpoint to continue from: a folder or ``latest``; ``None`` to start anew."""
    arena: Arena | None = None
    """The memory that the processes of this host share; ``None`` if they share none, so that everything uses the network."""
    make_member: MakeMember | None = None
    """Makes the worker's team member for sums of gradients in simulated memory; ``None``: the sums are in `arena`."""
    slowdown: Callable[[], float] = lambda: 1.0
    """The speed factor of a modelled device for work that begins now (a simulated host may be slow for a while)."""
    make_device: Callable[[RolePlacement], Device] | None = None
    """Makes the device of a worker that computes with torch; ``None``: the device that its placement names."""

    era: GridEra | None = None
    """The stretch of the run for which all of this holds, if another grid may follow (`zmqtrain.train.grid_run`)."""

    generation: str = ""
    """Tells the processes that are this worker's group from those that were before, if a whole group is lost at once and comes
    back: it belongs to the names of what they do together, since a process that is lost may still have sent something."""

    @property
    def modelled(self) -> bool:
        """Whether this role only waits for the time that computing would take: it has no task, and does not need torch."""
        return self.role.device == "modelled" and self.make_device is None and not self.topology.trains
