"""Warnings about jobs that can run but are probably not what the user meant: idle machines, exchanges without a peer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zmqtrain.topology.compute import Noise
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.unused_rules import differs
from zmqtrain.topology.world import ENGINES
from zmqtrain.words import counted, joined

#: A warning lists at most this many hosts or devices, and then says how many more there are.
MOST_LISTED = 8
#: The engines that heed a setting of ``[engine]``. (`wait` and `address` are heeded wherever agents join by themselves, which
#: `zmqtrain agent` lets those of any file do.)
_OF_ENGINES: dict[str, tuple[str, ...]] = {
    "options": (),
    "client": ("ssh",),
    "sync": ("ssh", "slurm"),
    "slurm": ("slurm",),
    "kubernetes": ("kubernetes",),
    "ray": ("ray",),
}
#: The engines whose processes may outlive the launcher.
_OUTLIVING = ("ssh", "local")


@dataclass(frozen=True, slots=True)
class Caution:
    """A warning that is shown before a run."""

    name: str
    """The subject: ``idle``, ``exchange``, ``replicas``, ``faults``, ``noise`` or ``engine``."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"warning: {self.what}: {self.remedy}"


def cautions(topology: Topology, placement: Placement, gpus: int = 0, *, emulated: bool = False) -> tuple[Caution, ...]:
    """All warnings, as far as the hosts are known. ``gpus``: of this machine, which count where it is the run's one
    host. ``emulated``: the launch is."""
    unused = () if emulated else (*_faults(topology), *_noise(topology), *_engine(topology))
    if topology.hosts_open:
        return unused
    return (
        *_hosts(topology, placement),
        *_devices(topology, placement, gpus),
        *_slots(topology, placement),
        *_alone(topology),
        *_copies(topology, placement),
        *unused,
    )


def _faults(topology: Topology) -> Iterator[Caution]:
    if topology.faults:
        yield Caution(
            "faults",
            f"{counted(len(topology.faults), 'fault')} of the file would not happen: a launch carries out [[faults]] only "
            "if it is emulated",
            "add --emulate, or use zmqtrain simulate; remove them if they are not meant",
        )


def _noise(topology: Topology) -> Iterator[Caution]:
    if topology.compute.noise != Noise() and topology.compute.device != "modelled":
        yield Caution(
            "noise",
            "[compute] noise would have no effect: a launch takes the time that its steps take",
            "use zmqtrain simulate; remove it if it is not meant",
        )


def _engine(topology: Topology) -> Iterator[Caution]:
    """Settings of another engine than the run's. They are not refused, since ``--engine`` may name another one than the file. What
    an engine from another package heeds is not known."""
    engine = topology.engine
    where = [(f"[engine] {name}", kinds) for name, kinds in _OF_ENGINES.items() if differs(topology, ("engine", name))]
    for what, kinds in [*where, *([("[job] alone", _OUTLIVING)] if differs(topology, ("job", "alone")) else ())]:
        if engine.kind in ENGINES and engine.kind not in kinds:
            these = " and ".join(f'"{kind}"' for kind in kinds) if kinds else "those from other packages"
            yield Caution("engine", f'{what} would have no effect with the engine "{engine.kind}"', f"it is for {these}: remove it")
    if engine.sync_limit != type(engine).model_fields["sync_limit"].default and not engine.sync:
        yield Caution("engine", "[engine] sync_limit would have no effect", "set sync = true, or remove it")


def _hosts(topology: Topology, placement: Placement) -> Iterator[Caution]:
    idle = [host.name for host in topology.hosts if not placement.of_host(host.name)]
    if idle:
        busy = len(topology.hosts) - len(idle)
        yield Caution(
            "idle",
            f"{_listed(idle)} would be idle: {_roles(placement)} on {busy} of {len(topology.hosts)} hosts",
            "raise [compute] groups or group_size, or remove both (then each host gets a worker), or remove the idle hosts",
        )


def _devices(topology: Topology, placement: Placement, gpus: int) -> Iterator[Caution]:
    if topology.compute.device not in ("auto", "cuda"):
        return
    remedy = "raise [compute] groups or group_size to use them, or remove both (then each device gets a worker)"
    idle = [f"{device} of {host.name}" for host in topology.hosts for device in _unused(host, placement)]
    if idle:
        full = [host.name for host in topology.hosts if len(placement.of_host(host.name)) >= host.slots < len(host.devices)]
        if full:
            remedy = f"raise slots of {_listed(full)}: each worker on a device takes a slot"
        yield Caution("idle", f"{_listed(idle)} would be idle", remedy)
    (host, *more) = topology.hosts
    workers = sum(role.kind == "worker" for role in placement.of_host(host.name))
    if not more and host.local and not host.devices and workers < gpus:
        yield Caution("idle", f"{gpus - workers} of this machine's {gpus} GPUs would be idle", remedy)


def _unused(host: Host, placement: Placement) -> Sequence[str]:
    here = placement.of_host(host.name)
    used = {role.device for role in here}
    return [device for device in host.devices if device not in used and device != "cpu"] if here else ()


def _slots(topology: Topology, placement: Placement) -> Iterator[Caution]:
    """Warn if half of the processors, or more, would be idle. Devices are not looked at here."""
    compute = topology.compute
    if compute.device == "modelled" or any(host.slots == 0 for host in topology.hosts):
        return
    hosts = [host for host in topology.hosts if placement.of_host(host.name)]
    if compute.device != "cpu" and (compute.device == "cuda" or any(host.devices for host in hosts)):
        return  # what counts is whether their devices are busy
    slots, used = sum(host.slots for host in hosts), 0
    for host in hosts:
        roles = placement.of_host(host.name)
        threads = sum(role.threads for role in roles if role.kind == "worker") // compute.pipeline
        used += min(host.slots, threads + sum(role.threads for role in roles if role.kind != "worker"))
    if 2 * used <= slots:
        remedy = f"remove [compute] threads = {compute.threads}, or raise it" if compute.threads else "add workers"
        yield Caution("idle", f"{slots - used} of {slots} slots would be idle", remedy)


def _alone(topology: Topology) -> Iterator[Caution]:
    kind = topology.exchange.kind
    if kind in ("gossip", "averaging") and topology.compute.groups == 1:
        doing = "gossip" if kind == "gossip" else "average"
        yield Caution(
            "exchange",
            f'there is no other group to {doing} with: kind = "{kind}" does nothing here',
            "raise [compute] groups, or remove [exchange] kind",
        )


def _copies(topology: Topology, placement: Placement) -> Iterator[Caution]:
    hosts = {server.host for server in placement.server_roles}
    if topology.replicated and len(hosts) == 1 and len(topology.hosts) > 1:
        yield Caution(
            "replicas",
            f"all model servers are on {min(hosts)}, and so are the copies of their shards",
            "raise [exchange] shards, so that a lost host does not take all with it",
        )


def _roles(placement: Placement) -> str:
    servers = placement.servers + placement.fc_servers
    return counted(placement.world_size, "worker") + (f" and {counted(servers, 'server')}" if servers else "")


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_LISTED:
        return f"{', '.join(names[:MOST_LISTED])} and {len(names) - MOST_LISTED} more"
    return joined(names)
