"""Give machines that come while an elastic run trains a place in it (``[job] max_workers``, ``[exchange] max_servers``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqtrain.errors import UsageError
from zmqtrain.topology.elastic import why_it_is_not

if TYPE_CHECKING:
    from zmqtrain.membership.view import View
    from zmqtrain.topology.placement import Placement
    from zmqtrain.topology.schema import Topology


class Places:
    """The places for workers, or model servers, beyond those with which the run begins. Sans-IO."""

    def __init__(self, topology: Topology, placement: Placement) -> None:
        self._topology, self._placement = topology, placement
        self._given: dict[str, float] = {}  # host -> until when its machine may come

    def take(self, view: View, now: float) -> str:
        """The name of the host that another machine takes part as. It is kept for the machine as long as joining may take.

        Raises `UsageError` if there is none."""
        topology, spares = self._topology, self._placement.spares
        if not topology.elastic:
            reason, _ = why_it_is_not(topology)
            raise UsageError(f"nobody can join the run while it trains: {reason}")
        if not spares:
            workers = topology.compute.workers
            more = "[exchange] max_servers" if topology.moves_shards else "[job] max_workers"
            raise UsageError(f"nobody can join the run beyond the {workers} workers with which it began: {more} says so")
        if not view.complete:
            raise UsageError("nobody can join the run yet: not all members with which it begins have joined")
        for role in spares:
            if f"agent/{role.host}" not in view.members and self._given.get(role.host, now) <= now:
                self._given[role.host] = now + topology.job.timeouts.join_s
                return role.host
        most = f"[job] max_workers = {topology.job.max_workers}"
        if not self._placement.spare_workers:
            most = f"[exchange] max_servers = {topology.exchange.max_servers}"
        raise UsageError(f"nobody can join the run: all others that it may have are there ({most})")
