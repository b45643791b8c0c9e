"""What a worker's side of the model servers must know: its place, the names of the others, and the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqtrain.exchange.momentum import Compensation, expected_staleness
from zmqtrain.exchange.server_messages import PolicyKind
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.bucket_limit import PieceLimit
from zmqtrain.topology.placement import Placement, RolePlacement
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class ModelServerSettings:
    """The settings of one worker; all workers have the same, apart from ``group`` and ``position``."""

    group: int
    position: int
    groups: tuple[tuple[PeerId, ...], ...]
    """The workers of each group, by position."""
    servers: tuple[PeerId, ...]
    policy: PolicyKind = "async"
    bound: int = 0
    snapshot: bool = False
    pieces: PieceLimit = field(default_factory=PieceLimit)
    compensate: bool = False
    """Adapt the optimizer's momentum to what asynchrony adds (`zmqtrain.exchange.momentum`)."""
    look_ahead: bool = False
    """Store parameters as they are expected to be when their gradient arrives (`zmqtrain.exchange.look_ahead`)."""
    own_rate: bool = False
    """Whether the job, and not the task, sets the learning rate."""
    compression: str = "none"
    compression_ratio: float = 0.01
    compression_rank: int = 4
    clip_norm: float = 0.0
    judges: bool = False
    """Whether gradients may not be finite, in which case all workers that wait for each other skip the update."""
    whole_groups: bool = False
    """Whether workers may be lost, and no worker of a group can train without the others."""
    overlap: bool = True
    """Exchange buckets during backward and the next forward, instead of between them."""
    request_s: float = 60.0
    """How long a server may take to answer a request."""
    barrier_s: float = 600.0
    """How long parameters or the rest of the group may take (other groups may evaluate in the meantime)."""
    fc_server: PeerId | None = None
    """The FC server that workers know, if there is one. It must hear who trains, as model servers do."""
    fc_copied: bool = False
    """Whether another FC server has a copy of what it has."""

    @property
    def compensation(self) -> Compensation:
        """How the optimizer's momentum and learning rate are adapted."""
        groups = len(self.groups)
        staleness = expected_staleness(self.policy, groups, self.bound)
        return Compensation(staleness, self.compensate, self.look_ahead, self.own_rate, groups)

    @classmethod
    def of(cls, topology: Topology, placement: Placement, role: RolePlacement, timeouts: Timeouts) -> ModelServerSettings:
        """The settings of the worker ``role``."""
        exchange = topology.exchange
        return cls(
            group=role.group,
            position=role.position,
            groups=tuple(placement.group_members(group) for group in range(placement.groups)),
            servers=tuple(server.peer for server in placement.server_roles),
            fc_server=next((server.peer for server in placement.fc_roles), None),
            fc_copied=topology.fc_copied,
            policy=exchange.policy,
            bound=exchange.bound or 0,
            snapshot=exchange.snapshot,
            pieces=PieceLimit.of(topology),
            compensate=topology.optimizer.momentum == "auto",
            look_ahead=topology.optimizer.look_ahead == "auto",
            own_rate=topology.optimizer.lr is not None,
            compression=exchange.compression,
            compression_ratio=exchange.compression_ratio,
            compression_rank=exchange.compression_rank,
            clip_norm=topology.optimizer.clip_norm,
            judges=topology.compute.precision == "float16" and not topology.fc_servers and not topology.divided,
            whole_groups=topology.whole_groups,
            overlap=topology.compute.overlap,
            request_s=timeouts.request_s,
            barrier_s=timeouts.barrier_s,
        )
