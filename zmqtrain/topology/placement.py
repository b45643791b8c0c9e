"""Which role runs on which host: a pure function of the topology.

Workers are spread over all hosts: on free devices first, then on hosts without a worker, then evenly by slots. Where there are
at least as many groups as hosts, the workers of a group are together on one host as long as one has room; fewer groups are spread,
too, each over as few hosts as that leaves. The groups of a pipeline are on the same ones. Model servers go round the hosts in turn,
those without workers first. Servers take no slot: they wait for the network most of the time. The FC server computes, so it goes
where slots are left, if any are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal, TypeVar

from zmqtrain.errors import PlacementError
from zmqtrain.topology.compute import Compute
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.words import counted

T = TypeVar("T")
RoleKind = Literal["worker", "server", "fc"]
#: What the names of hosts of workers begin with that may come later.
SPARE = "joined-"
#: An error lists at most this many hosts, and then says how many more there are.
MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """One process of the run: its role, and where it runs."""

    kind: RoleKind
    index: int
    """The worker's rank over all workers, or the number of the server or FC server."""
    peer: str
    host: str
    local_rank: int
    """The process's number among those of its kind on its host."""
    threads: int
    device: str
    """``cpu``, ``cuda:N``, ``modelled``, or ``auto``: the worker takes CUDA device ``local_rank`` (modulo their number), if the
    host has any.
    """
    group: int
    """The worker's group; -1 for servers."""
    position: int
    """The worker's position in its group; -1 for servers."""
    slot: int = 0
    """Number of the worker's slot on its host; the groups of a pipeline have the same ones."""


@dataclass(frozen=True, slots=True)
class _Index:
    """Look-up tables for roles, made at the first look-up."""

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
    """Names of all hosts in the file's order, including those without a role."""
    groups: int
    group_size: int
    servers: int
    fc_servers: int = 0
    spares: tuple[RolePlacement, ...] = ()
    """Workers or model servers that may come later, each on a host of its own that the file does not name. Each worker counts as a
    further group."""
    _index: _Index | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def workers(self) -> tuple[RolePlacement, ...]:
        """The workers, by rank."""
        return self.roles[: self.world_size]

    @property
    def members(self) -> int:
        """How many processes join: the roles, and an agent on each host."""
        return len(self.hosts) + len(self.roles)

    @property
    def everyone(self) -> tuple[RolePlacement, ...]:
        """All workers that there may ever be, by rank: also those that may come later."""
        return (*self.workers, *self.spare_workers)

    @property
    def spare_workers(self) -> tuple[RolePlacement, ...]:
        """The workers that may come later."""
        return tuple(role for role in self.spares if role.kind == "worker")

    @property
    def server_roles(self) -> tuple[RolePlacement, ...]:
        """The model servers with which the run begins, by number: each with a shard."""
        return self.roles[self.world_size : self.world_size + self.servers]

    @property
    def every_server(self) -> tuple[RolePlacement, ...]:
        """All model servers that there may ever be, by number."""
        return (*self.server_roles, *(role for role in self.spares if role.kind == "server"))

    @property
    def fc_roles(self) -> tuple[RolePlacement, ...]:
        """The FC servers, by number; if another one has a copy of what the only one has, it is the last."""
        return self.roles[self.world_size + self.servers :]

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.groups * self.group_size

    def group_members(self, group: int) -> tuple[str, ...]:
        """The peer ids of a group's workers, by position."""
        if group >= self.groups:
            return (self.spare_workers[group - self.groups].peer,)
        return tuple(role.peer for role in self.roles[group * self.group_size : (group + 1) * self.group_size])

    def of_host(self, name: str) -> tuple[RolePlacement, ...]:
        """The roles on the host ``name``."""
        return self._indexed().by_host.get(name, ())

    def role(self, peer: str) -> RolePlacement:
        """The role of ``peer``. Raises ``KeyError`` if there is none."""
        return self._indexed().by_peer[peer]

    def _indexed(self) -> _Index:
        if self._index is None:
            object.__setattr__(self, "_index", _Index.of((*self.roles, *self.spares)))
        assert self._index is not None
        return self._index

    def to_dict(self) -> dict[str, Any]:
        """The placement as plain values; `from_dict` restores it."""
        return {
            "roles": [asdict(role) for role in self.roles],
            "hosts": list(self.hosts),
            "groups": self.groups,
            "group_size": self.group_size,
            "servers": self.servers,
            "fc_servers": self.fc_servers,
            "spares": [asdict(role) for role in self.spares],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Placement:
        """The placement that `to_dict` wrote."""
        return cls(
            roles=tuple(RolePlacement(**role) for role in values["roles"]),
            hosts=tuple(values["hosts"]),
            groups=values["groups"],
            group_size=values["group_size"],
            servers=values["servers"],
            fc_servers=values["fc_servers"],
            spares=tuple(RolePlacement(**role) for role in values["spares"]),
        )


def place(topology: Topology) -> Placement:
    """Put every role on a host.

    Raises `PlacementError` if there are more workers than slots and the file does not allow it.
    """
    compute = topology.compute
    sharing = _rows_together(_hosts_of_workers(topology), compute)
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
    # From the last host backwards, hosts without workers first: groups begin with the first hosts, so the last have more room.
    order = [host for busy in (False, True) for host in reversed(topology.hosts) if (taken[host.name] > 0) is busy]
    roles.extend(_server(index, order) for index in range(topology.servers))
    roles.extend(_fc_servers(topology, taken))
    return Placement(
        roles=tuple(roles),
        hosts=tuple(host.name for host in topology.hosts),
        groups=compute.groups,
        group_size=compute.group_size,
        servers=topology.servers,
        fc_servers=topology.fc_servers,
        spares=(
            *(_spare(topology, number) for number in range(topology.spares)),
            *(_spare_server(topology, number) for number in range(topology.spare_servers)),
        ),
    )


def _spare(topology: Topology, number: int) -> RolePlacement:
    """A worker that may come later, on a machine of which nothing is known yet."""
    compute, rank = topology.compute, topology.compute.workers + number
    device = compute.device if compute.device in ("cpu", "modelled") else "auto"
    threads = compute.threads or max(1, topology.hosts[0].slots)
    return RolePlacement("worker", rank, f"worker/{rank}", f"{SPARE}{number + 1}", 0, threads, device, compute.groups + number, 0)


def _spare_server(topology: Topology, number: int) -> RolePlacement:
    """A model server that may come later. (Runs that may have more workers have no model servers.)"""
    index = topology.servers + number
    return RolePlacement("server", index, f"server/{index}", f"{SPARE}{number + 1}", 0, 1, "cpu", -1, -1)


def heads_of(topology: Topology, placement: Placement) -> tuple[str, ...]:
    """The servers that begin with a shard each, if others may come to serve it: model servers, and then, for the merged layers, the
    FC server. Empty if no server may be lost, and no shard may move."""
    if not topology.moves_shards:
        return ()
    fc = placement.fc_roles[:1] if topology.fc_copied else ()
    return tuple(server.peer for server in (*placement.server_roles, *fc))


def backups_for(placement: Placement, server: str) -> tuple[str, ...]:
    """The other model servers, by how well each can keep a copy of what ``server`` serves: those on other hosts first, then by
    number, going round from the next one on, so that the copies of all servers are spread evenly."""
    servers = placement.every_server
    own = placement.role(server)

    def key(other: RolePlacement) -> tuple[bool, int]:
        return other.host == own.host, (other.index - own.index) % len(servers)

    return tuple(other.peer for other in sorted(servers, key=key) if other.peer != server)


def place_before(topology: Topology) -> Placement:
    """The job's groups and roles while the hosts' slots are not known yet: which roles there will be, but not where they will
    run.
    """
    hosts = tuple(host.model_copy(update={"slots": max(1, host.slots)}) for host in topology.hosts)
    job = topology.job.model_copy(update={"oversubscribe": True})
    return place(topology.model_copy(update={"hosts": hosts, "job": job}))


def _rows_together(hosts: Sequence[str], compute: Compute) -> list[str]:
    """The host of each rank, where a group's hosts are given in order: on a grid, row after row.

    The workers of a column are neighbours (`Compute.column_of`), but those of a row share a host where they fit: gradients of
    weights are then added up in its memory, which are often more than the activations that columns exchange."""
    rows, columns, size = compute.rows, compute.columns, compute.group_size
    groups = [hosts[start : start + size] for start in range(0, len(hosts), size)]
    return [group[position % rows * columns + position // rows] for group in groups for position in range(size)]


def _slots(hosts: Sequence[str]) -> list[int]:
    """The slot number of each worker on its host, in the order of ``hosts``."""
    taken = Counter[str]()
    found = []
    for host in hosts:
        found.append(taken[host])
        taken[host] += 1
    return found


def _repeated(of_slots: Sequence[T], size: int, pipeline: int) -> list[T]:
    """One value for each rank, where ``of_slots`` lists each value once for ``pipeline`` groups of ``size`` workers."""
    sets = [of_slots[start : start + size] for start in range(0, len(of_slots), size)]
    return [each for one in sets for _ in range(pipeline) for each in one]


def _hosts_of_workers(topology: Topology) -> list[str]:
    """The host of each rank; for the groups of a pipeline, only those of the first."""
    size, groups = topology.compute.group_size, topology.compute.groups // topology.compute.pipeline
    workers = groups * size
    unknown = next((host.name for host in topology.hosts if host.slots == 0), None)
    if unknown is not None:
        raise PlacementError(f"the number of processors of {unknown} is found out only at launch: give the host slots")
    slots = sum(host.slots for host in topology.hosts)
    if workers > slots and not topology.job.oversubscribe:
        raise PlacementError(_too_many(topology, slots))
    room = [host.slots * -(-workers // max(1, slots)) for host in topology.hosts]  # more than slots where workers share them
    found: list[int] = []
    if groups < len(topology.hosts):
        spread = Counter(_spread(topology, room, workers, 1))
        room = [spread[number] for number in range(len(room))]
    else:
        for number in _spread(topology, [count // size for count in room], groups, size):
            found.extend([number] * size)
            room[number] -= size
    found.extend(_together(room, groups - len(found) // size, size))
    return [topology.hosts[number].name for number in found]


def _spread(topology: Topology, room: Sequence[int], count: int, size: int) -> list[int]:
    """Place up to ``count`` units of ``size`` workers, each unit on one host; ``room`` is the number of units that each host can
    take.

    Returns the host numbers. Free devices come first, then hosts without a worker, then hosts with the most slots per worker;
    ties go to the first host in the file."""
    devices = [0 if topology.compute.device in ("cpu", "modelled") else len(host.devices) for host in topology.hosts]

    def key(number: int, units: int) -> tuple[int, float, int, int]:
        taken, workers = units * size, (units + 1) * size
        if taken < devices[number]:
            return 0, -devices[number] / workers, number, units
        return (2 if units else 1), -topology.hosts[number].slots / workers, number, units

    waiting = [key(number, 0) for number in range(len(room)) if room[number]]
    heapify(waiting)
    found: list[int] = []
    while waiting and len(found) < count:
        *_, number, units = heappop(waiting)
        found.append(number)
        if units + 1 < room[number]:
            heappush(waiting, key(number, units + 1))
    return found


def _together(room: Sequence[int], groups: int, size: int) -> list[int]:
    """The host numbers of the workers of ``groups`` groups: each group fills the emptiest host, then the next, to be on few
    hosts.
    """
    free = [(-count, number) for number, count in enumerate(room) if count]
    heapify(free)
    found: list[int] = []
    for _ in range(groups):
        left = size
        while left:
            count, number = heappop(free)
            here = min(-count, left)
            left -= here
            found.extend([number] * here)
            if -count > here:
                heappush(free, (count + here, number))
    return found


def _device(wanted: str, host: Host, local_rank: int) -> str:
    if wanted in ("cpu", "modelled"):
        return wanted
    if host.devices:
        return host.devices[local_rank % len(host.devices)]
    return f"cuda:{local_rank}" if wanted == "cuda" else "auto"


def _server(index: int, hosts: Sequence[Host]) -> RolePlacement:
    host = hosts[index % len(hosts)]
    return RolePlacement("server", index, f"server/{index}", host.name, index // len(hosts), 1, "cpu", -1, -1)


def _fc_servers(topology: Topology, workers: Mapping[str, int]) -> list[RolePlacement]:
    """Each FC server goes on the host with the most slots left (ties: the last host) and gets those slots as threads. One that has
    a copy of what another one has goes on another host, if there is one.

    ``workers``: the number of workers on each host."""
    compute = topology.compute
    workers = {name: count // compute.pipeline for name, count in workers.items()}
    hosts: list[Host] = []
    for _ in range(topology.fc_servers + topology.fc_copied):
        left = {host.name: host.slots - workers[host.name] - hosts.count(host) for host in topology.hosts}
        free = [host for host in topology.hosts if not (topology.fc_copied and host in hosts)] or topology.hosts
        hosts.append(max(reversed(free), key=lambda host: left[host.name]))
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
        f"{counted(compute.workers, 'worker')} ({counted(compute.groups, 'group')} of {compute.group_size}) do not fit into "
        f"{counted(slots, 'slot')} ({each}). "
        "Either raise slots of a host or add [[hosts]]; or lower [compute] groups or group_size; or set oversubscribe = true in "
        "[job] to let workers share processors"
    )
