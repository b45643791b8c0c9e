"""Whether a run that has failed begins again from its newest checkpoint, and on which hosts (``[job] restarts``). Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pydantic import ValidationError

from zmqtrain.errors import ConnectivityError, PlacementError
from zmqtrain.run.ending import Ending
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.schema import Topology

#: Seconds before a run begins again if a host is missing: its processes need a moment to find out that they are cut off, and a
#: machine that starts again is not asked a hundred times.
PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Again:
    """How a run begins again."""

    number: int
    """Which restart of the run it is; 1 is the first."""
    topology: Topology
    """The job, on the hosts that are left."""
    placement: Placement
    """Its roles on these hosts."""
    without: tuple[str, ...]
    """The hosts of the file that do not take part."""
    pause_s: float
    """Seconds to wait before; 0 if no host is missing."""
    counts: bool
    """Whether it is one of ``[job] restarts``: not if the attempt before had not begun to train, as a host was still missing."""


class Restarts:
    """Counts the restarts of a run.

    Only failures that another try may cure count (exit codes of 128 and above), and only those of a run that had begun: a host that
    is missing at the first start is the user's to see. A host that was lost is left out where the others have room for all roles,
    or if the file leaves the number of workers to the hosts. Otherwise it is waited for, up to ``[job] min_workers_wait``.
    """

    def __init__(self, topology: Topology, placement: Placement, *, hosts_return: bool) -> None:
        """``topology``: the job on all its hosts, with its ``placement``. ``hosts_return``: whether a host is there again at once,
        since it is only a set of processes of this machine."""
        self._topology, self._placement, self._hosts_return = topology, placement, hosts_return
        self.used = 0
        """How many restarts there were, also under another launcher."""
        self._failed_at: float | None = None  # when the run failed after it had begun
        self._lost: dict[str, None] = {}  # hosts that were lost since the run has last begun

    @property
    def most(self) -> int:
        """How many restarts there may be: none if somebody else starts the agents, who may start all of the run again."""
        return self._topology.job.restarts if self._topology.engine.starts_agents else 0

    def after(self, ending: Ending, *, began: bool, now: float) -> Again | None:
        """How the run goes on after this ending; ``None`` if it has ended.

        Args:
            ending: of the run, or of an attempt to begin it again.
            began: whether all roles had joined.
            now: the time in seconds, on any clock.
        """
        if ending.status != "failed" or ending.exit_code < ConnectivityError.exit_code:
            return None
        if began:
            if self.used >= self.most:
                return None
            self.used += 1
            self._failed_at, self._lost = now, {}
        elif self._failed_at is None or now - self._failed_at >= self._topology.job.min_workers_wait:
            return None
        if not self._hosts_return:
            self._lost |= dict.fromkeys(ending.lost_hosts)
        pause_s = PAUSE_S if not began or ending.lost_hosts else 0.0
        left = _without(self._topology, self._lost)
        if left is None:
            return Again(self.used, self._topology, self._placement, (), pause_s, counts=began)
        return Again(self.used, *left, tuple(self._lost), pause_s, counts=began)


def _without(topology: Topology, hosts: Collection[str]) -> tuple[Topology, Placement] | None:
    """The job without these hosts, and its roles on the others; ``None`` if it needs them."""
    left = [host for host in topology.hosts if host.name not in hosts]
    if len(left) == len(topology.hosts) or not left:
        return None
    try:
        smaller = topology.with_hosts(left)
        return smaller, place(smaller)
    except (ValidationError, PlacementError):  # too few slots, or a rule that names a host
        return None
