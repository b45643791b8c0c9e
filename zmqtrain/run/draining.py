"""Let a host leave an elastic run while it trains: what its model servers have moves to others, then its workers end, and others
train what they have begun."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from zmqtrain.errors import UsageError
from zmqtrain.membership.agent_link import WITHDRAW
from zmqtrain.membership.barrier import name_some
from zmqtrain.topology.elastic import why_it_is_not
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.waiting import in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zmqtrain.membership.coordinator import Coordinator, EventCallback
    from zmqtrain.membership.view import View
    from zmqtrain.net.endpoint import Endpoint, PeerId
    from zmqtrain.topology.placement import Placement
    from zmqtrain.topology.schema import Topology


def check_drain(host: str, topology: Topology, placement: Placement, view: View) -> None:
    """Raises `UsageError`, with the reason, if the run cannot continue without ``host``, or has no such host."""
    if host not in placement.hosts and not placement.of_host(host):
        meant = did_you_mean(host, placement.hosts)
        known = f"did you mean {meant}?" if meant else f"it has {name_some(list(placement.hosts))}"
        raise UsageError(f"the run has no host {host}: {known}")
    if not topology.elastic:
        reason, _ = why_it_is_not(topology)
        raise UsageError(f"the run cannot continue without {host}: {reason}")
    if f"agent/{host}" not in view.members:
        raise UsageError(f"{host} is not in the run: it has no role, has left, or was lost")
    for what, reason in _which_stay(host, topology, placement, view):
        raise UsageError(f"the run cannot continue without {host}: {what} runs there, {reason}")
    if not any(member.host != host for member in view.workers()):
        raise UsageError(f"the run cannot continue without {host}: it has no worker on another host")
    if topology.whole_groups:
        elsewhere = [member.group for member in view.workers() if member.ready and member.host != host]
        if not any(elsewhere.count(group) == placement.group_size for group in elsewhere):
            raise UsageError(f"the run cannot continue without {host}: each group that trains has a worker there")


def _which_stay(host: str, topology: Topology, placement: Placement, view: View) -> Iterator[tuple[str, str]]:
    """The roles that keep the host in the run, each with the reason."""
    for role in placement.of_host(host):
        if role.kind == "fc":
            yield role.peer, "and the layers of an FC server do not move"
        elif role.kind == "server" and not topology.moves_shards:
            needs = "several of them, groups of one worker, and [job] elastic = true or [exchange] replicas = 1"
            yield role.peer, f"and shards move only with {needs}"
        elif role.kind == "server" and not any(
            member.host != host and member.peer not in view.leaving for member in view.servers()
        ):
            yield role.peer, "and no other host has a model server that could have its shard"


async def drain(
    host: str,
    endpoint: Endpoint,
    coordinator: Coordinator,
    topology: Topology,
    placement: Placement,
    say: Callable[[str], None],
    record: EventCallback | None = None,
) -> str:
    """Ask ``host`` to leave, and wait until it has. Returns what happened, for the user. ``record``: is told that it was asked.

    Raises `UsageError` if the run cannot continue without it, and `ConnectivityError` if it does not leave in time."""
    if not coordinator.running.is_set():
        raise UsageError(f"{host} cannot leave yet: not all members of the run have joined")
    check_drain(host, topology, placement, coordinator.view)
    if record is not None:
        record("drain", {"host": host, "roles": [role.peer for role in placement.of_host(host)]})
    timeouts, agent = topology.job.timeouts, f"agent/{host}"
    servers = [role.peer for role in placement.of_host(host) if role.kind == "server"]
    if servers:
        say(f"{host} is asked to leave: what {' and '.join(servers)} {'has' if len(servers) == 1 else 'have'} moves to others")
        coordinator.let_go(servers)
        # As long as it takes: they train on meanwhile.
        moved = partial(_has_moved, agent=agent, servers=servers)
        if not await coordinator.until(moved):
            return "the run has ended"
        if agent not in coordinator.view.members:
            return f"{host} was lost while it was to leave"
    workers = sum(role.kind == "worker" for role in placement.of_host(host))
    count = "its worker ends" if workers == 1 else f"its {workers} workers end"
    if workers:
        say(f"{host} is asked to leave: {count}, and others train what is left")
    await endpoint.request(agent, WITHDRAW, timeout=timeouts.request_s)
    async with in_time(agent, "its roles to end", timeouts.grace_s + timeouts.lost_s):
        went_on = await coordinator.until(lambda view: agent not in view.members)
    return f"{host} has left the run" if went_on else "the run has ended"


def _has_moved(view: View, *, agent: PeerId, servers: Sequence[PeerId]) -> bool:
    """Whether these servers have nothing any more that others need, or are lost with their host."""
    return agent not in view.members or not any(server in chain for chain in view.chains for server in servers)
