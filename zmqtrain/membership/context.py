"""Everything that a role is given. A role opens nothing itself, so that it runs in anybody's event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.membership.client import Membership
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.topology.placement import Placement, RolePlacement
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Ladder


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What a worker or server needs. Whoever made the endpoint closes it after the role has returned."""

    endpoint: Endpoint
    membership: Membership
    role: RolePlacement
    placement: Placement
    topology: Topology
    ladder: Ladder
    recorder: Recorder = field(default_factory=NullRecorder)
    data_path: str | None = None
    """Where the task finds its data: what the person said, else what the topology says."""
    resume: str | None = None
    """The checkpoint to go on from: a folder or ``latest``; ``None`` to begin anew."""
