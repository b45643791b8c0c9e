"""Which role runs where: a pure function of the topology.

Workers of a group stay together on one host where one has room, groups spread over the hosts with the most free slots (those of a
pipeline over the same ones), and model
servers go round the hosts in turn. Servers take no slot: they wait for the network most of the time. The FC server computes, so it
goes where slots are left, if any are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal, TypeVar

from zmqtrain.errors import PlacementError
from zmqtrain.topology.schema import Host, Topology

T = TypeVar("T")
RoleKind = Literal["worker", "server", "fc"]
#: Hosts that an error lists before it says how many more there are.
MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """One process of the run and its place."""

    kind: RoleKind
    index: int
    """The worker's rank over all workers, or the number of the server or FC server."""
    peer: str
    host: str
    local_rank: int
    """Number among the processes of its kind on its host."""
    threads: int
    device: str
    """``cpu``, ``cuda:N``, ``modelled``, or ``auto``: the worker takes CUDA device ``local_rank`` (modulo their number) if any."""
    group: int
    """The worker's group; -1 for others."""
    position: int
    """The worker's place in its group; -1 for others."""
    slot: int = 0
    """Number of the worker's slot on its host; the groups of a pipeline have the same ones."""


@dataclass(frozen=True, slots=True)
class _Index:
    """Where to find a role; made when first asked for."""

    by_peer: Mapping[str, RolePlacement]
    by_host: Mapping[str, tuple[RolePlacement, ...]]

    @classmethod
    def of(cls, roles: tuple[RolePlacement, ...]) -> _Index:
        by_host: dict[str, list[RolePlacement]] = {}
        for role in roles:
            by_host.setdefault(role.host, []).append(role)
        return cls({role.peer: role for role in roles}, {host: tuple(here) for host, here in by_host.items()})


@dataclass(frozen=True, slots=True)
class Placement:
    """All processes of the run: workers by rank, then servers by number, then FC servers."""

    roles: tuple[RolePlacement, ...]
    hosts: tuple[str, ...]
    """Names of all hosts, in the file's order, also of those without a role."""
    groups: int
    group_size: int
    servers: int
    fc_servers: int = 0
    _index: _Index | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def workers(self) -> tuple[RolePlacement, ...]:
        """By rank."""
        return self.roles[: self.world_size]

    @property
    def server_roles(self) -> tuple[RolePlacement, ...]:
        """By number."""
        return self.roles[self.world_size : self.world_size + self.servers]

    @property
    def fc_roles(self) -> tuple[RolePlacement, ...]:
        """FC servers, by number."""
        return self.roles[self.world_size + self.servers :]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.groups * self.group_size

    def group_members(self, group: int) -> tuple[str, ...]:
        """The peers of a group's workers, by position."""
        return tuple(role.peer for role in self.roles[group * self.group_size : (group + 1) * self.group_size])

    def of_host(self, name: str) -> tuple[RolePlacement, ...]:
        """The roles on one host."""
        return self._indexed().by_host.get(name, ())

    def role(self, peer: str) -> RolePlacement:
        """The role of this peer. Raises ``KeyError``."""
        return self._indexed().by_peer[peer]

    def _indexed(self) -> _Index:
        if self._index is None:
            object.__setattr__(self, "_index", _Index.of(self.roles))
        assert self._index is not None
        return self._index

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `from_dict` gives an equal placement."""
        return {
            "roles": [asdict(role) for role in self.roles],
            "hosts": list(self.hosts),
            "groups": self.groups,
            "group_size": self.group_size,
            "servers": self.servers,
            "fc_servers": self.fc_servers,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Placement:
        """The placement that `to_dict` was called on."""
        return cls(
            roles=tuple(RolePlacement(**role) for role in values["roles"]),
            hosts=tuple(values["hosts"]),
            groups=values["groups"],
            group_size=values["group_size"],
            servers=values["servers"],
            fc_servers=values["fc_servers"],
        )


def place(topology: Topology) -> Placement:
    """Put every role on a host.

    Raises `PlacementError` where there are more workers than slots and the file does not allow it.
    """
    compute = topology.compute
    sharing = _hosts_of_workers(topology)
    counts = Counter(sharing)
    host_of = _repeated(sharing, compute.group_size, compute.pipeline)
    slots = _repeated(_slots(sharing), compute.group_size, compute.pipeline)
    by_name = {host.name: host for host in topology.hosts}
    taken = dict.fromkeys(by_name, 0)
    roles: list[RolePlacement] = []
    for rank, name in enumerate(host_of):
        roles.append(
            RolePlacement(
                kind="worker",
                index=rank,
                peer=f"worker/{rank}",
                host=name,
                local_rank=taken[name],
                threads=compute.threads or max(1, by_name[name].slots // counts[name]),
                device=_device(compute.device, by_name[name], slots[rank]),
                group=rank // compute.group_size,
                position=rank % compute.group_size,
                slot=slots[rank],
            )
        )
        taken[name] += 1
    roles.extend(_server(index, topology.hosts) for index in range(topology.servers))
    roles.extend(_fc_servers(topology, taken))
    return Placement(
        roles=tuple(roles),
        hosts=tuple(host.name for host in topology.hosts),
        groups=compute.groups,
        group_size=compute.group_size,
        servers=topology.servers,
        fc_servers=topology.fc_servers,
    )


def _slots(hosts: Sequence[str]) -> list[int]:
    """The slot of each on its host, in their order."""
    taken = Counter[str]()
    found = []
    for host in hosts:
        found.append(taken[host])
        taken[host] += 1
    return found


def _repeated(of_slots: Sequence[T], size: int, pipeline: int) -> list[T]:
    """What each rank has, where ``pipeline`` groups of ``size`` have what is listed once for all of them."""
    sets = [of_slots[start : start + size] for start in range(0, len(of_slots), size)]
    return [each for one in sets for _ in range(pipeline) for each in one]


def _hosts_of_workers(topology: Topology) -> list[str]:
    """The host of each rank; of a pipeline's groups, those of the first."""
    size, groups = topology.compute.group_size, topology.compute.groups // topology.compute.pipeline
    workers = groups * size
    slots = sum(host.slots for host in topology.hosts)
    if workers > slots and not topology.job.oversubscribe:
        raise PlacementError(_too_many(topology, slots))
    times = -(-workers // slots)  # how many workers share a slot
    # The emptiest host first; of equally empty ones the first in the file.
    free = [(-host.slots * times, number) for number, host in enumerate(topology.hosts)]
    heapify(free)
    host_of: list[str] = []
    for _ in range(groups):
        # All groups are of one size, so taking the emptiest host with room never costs another group its place together. A group
        # that fits on no host takes the emptiest whole, then the next: as few as can be.
        left = size
        while left:
            room, number = heappop(free)
            here = min(-room, left)
            left -= here
            host_of.extend([topology.hosts[number].name] * here)
            if -room > here:
                heappush(free, (room + here, number))
    return host_of


def _device(wanted: str, host: Host, local_rank: int) -> str:
    if wanted in ("cpu", "modelled"):
        return wanted
    if host.devices:
        return host.devices[local_rank % len(host.devices)]
    return f"cuda:{local_rank}" if wanted == "cuda" else "auto"


def _server(index: int, hosts: tuple[Host, ...]) -> RolePlacement:
    # From the last host backwards: groups fill the first hosts, so servers go where there is more room.
    host = hosts[-1 - index % len(hosts)]
    return RolePlacement("server", index, f"server/{index}", host.name, index // len(hosts), 1, "cpu", -1, -1)


def _fc_servers(topology: Topology, workers: Mapping[str, int]) -> list[RolePlacement]:
    """Each on the host with the most slots left, of equal ones the last, and with those slots for threads. ``workers``: on each."""
    compute = topology.compute
    workers = {name: count // compute.pipeline for name, count in workers.items()}
    hosts: list[Host] = []
    for _ in range(topology.fc_servers):
        left = {host.name: host.slots - workers[host.name] - hosts.count(host) for host in topology.hosts}
        hosts.append(max(reversed(topology.hosts), key=lambda host: left[host.name]))
    roles = []
    for index, host in enumerate(hosts):
        number = hosts[:index].count(host)
        threads = compute.threads or max(1, (host.slots - workers[host.name]) // hosts.count(host))
        device: str = compute.device
        if device in ("auto", "cuda") and host.devices:
            device = host.devices[(workers[host.name] + number) % len(host.devices)]
        roles.append(RolePlacement("fc", index, f"fc/{index}", host.name, number, threads, device, -1, -1))
    return roles


def _too_many(topology: Topology, slots: int) -> str:
    compute = topology.compute
    each = ", ".join(f"{host.name} has {host.slots}" for host in topology.hosts[:MOST_LISTED])
    if len(topology.hosts) > MOST_LISTED:
        each += f", and {len(topology.hosts) - MOST_LISTED} more hosts"
    return (
        f"{compute.groups} groups of {compute.group_size} are {compute.workers} workers, but there are {slots} slots ({each}). "
        "Three ways out: raise slots of a host or add [[hosts]]; lower [compute] groups or group_size; "
        "or set oversubscribe = true in [job], and workers share the processors"
    )
