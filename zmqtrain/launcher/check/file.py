"""What a topology file asks for, and whether this machine has it. Starts no process, and does not import the task."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.errors import CheckpointError, PlacementError, UsageError
from zmqtrain.launcher.elsewhere import require_here
from zmqtrain.launcher.engine import make_engine
from zmqtrain.launcher.faults import refused
from zmqtrain.launcher.ssh.pack import pack, program_files, require_inside
from zmqtrain.observe.sinks.make import make_sinks
from zmqtrain.processors import gpus
from zmqtrain.topology.cautions import cautions
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import Placement, place, place_before
from zmqtrain.topology.ranges import count
from zmqtrain.topology.schema import Network, Simulation, Topology
from zmqtrain.topology.units import format_duration, format_rate, format_size
from zmqtrain.train.checkpoint.weights import Weights
from zmqtrain.train.data_path import said_data_path
from zmqtrain.train.device.profile import Profile
from zmqtrain.words import counted

#: The number of ports that a process listens on: one for each lane.
PORTS_EACH = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    detail: str
    """What was found, or what is wrong."""
    remedy: str = ""
    """What to do. If ``ok``, it is only a possible improvement."""
    host: str = ""
    """The host; empty: this machine, or the file."""
    warning: bool = False
    """A run is possible, but may not be what the user meant."""


def look_at_file(topology: Topology, data: str | None, *, emulate: bool = False) -> tuple[Placement | None, list[Finding]]:
    """The placement of the roles, if they can be placed, and the findings. ``data``: the value of ``--data`` at the launch;
    ``emulate``: all hosts will be on this machine, whatever their addresses."""
    findings: list[Finding] = []
    placement: Placement | None = None
    try:
        unknown = topology.engine.gathers or any(host.slots == 0 for host in topology.hosts)
        placement = place_before(topology) if unknown else place(topology)
        findings += [_slots(topology, placement), *_ports(topology, placement)]
        warnings = cautions(topology, placement, gpus(), emulated=emulate)
        findings += [Finding(each.name, True, each.what, each.remedy, warning=True) for each in warnings]
    except PlacementError as error:
        findings.append(Finding("placement", False, str(error)))
    findings += [
        *_engine(topology, emulate=emulate),
        *_sinks(topology),
        _task(topology),
        *_data(topology, data),
        *_weights(topology),
        _port(topology),
        *_profile(topology),
        *_sync(topology),
    ]
    findings += [_encryption(topology), *_network(topology), *_simulation(topology, emulate=emulate)]
    return placement, findings


def _engine(topology: Topology, *, emulate: bool) -> list[Finding]:
    try:
        make_engine(topology.engine.kind)
        if not emulate:
            require_here(topology)
    except UsageError as error:
        return [Finding("engine", False, str(error))]
    return []


def _sinks(topology: Topology) -> list[Finding]:
    try:
        make_sinks(topology.observe.to)
    except UsageError as error:
        return [Finding("observe", False, str(error))]
    return []


def _slots(topology: Topology, placement: Placement) -> Finding:
    slots = sum(host.slots for host in topology.hosts)
    shared = " (oversubscribed: they share the processors)" if placement.world_size > slots else ""
    beside = counted(placement.servers, "model server")
    beside += f" and {counted(placement.fc_servers, 'FC server')}" if placement.fc_servers else ""
    where = "the slots of the hosts that join" if topology.engine.gathers else f"{counted(slots, 'slot')}{shared}"
    workers = f"{counted(placement.world_size, 'worker')} in {counted(placement.groups, 'group')}"
    if topology.hosts_open and topology.hosts_decide:
        workers = "one worker for each device or host"
    return Finding("slots", True, f"{workers} on {where}, and {beside}")


def _task(topology: Topology) -> Finding:
    if topology.job.task is None and topology.compute.device == "modelled":
        return Finding("task", True, "none, since devices are modelled")
    if topology.job.task is None:
        return Finding("task", True, "none: launch this file with a script, or set [job] task")
    try:
        place = find_task(topology.job.task, topology.job.folders())
    except UsageError as error:
        return Finding("task", False, str(error))
    return Finding("task", True, f"{place.function} in {place.file}")


def _data(topology: Topology, given: str | None) -> Iterator[Finding]:
    found = said_data_path(given, topology)
    if found is None:
        return
    source, path = found
    if topology.engine.kind != "local":
        yield Finding("data", True, f"{path} ({source}), on each host")
    elif Path(path).exists():
        yield Finding("data", True, f"{path} ({source})")
    else:
        yield Finding("data", False, f"{path} does not exist here: correct {source}. The path must exist on every host")


def _weights(topology: Topology) -> Iterator[Finding]:
    """The launching machine reads them."""
    given = topology.job.weights
    if given is None:
        return
    try:
        Weights.of_job(topology)
    except CheckpointError as error:
        yield Finding("weights", False, str(error))
    else:
        yield Finding("weights", True, f"{given} ([job] weights)")


def _sync(topology: Topology) -> Iterator[Finding]:
    """Check what would be copied to the hosts."""
    if topology.engine.kind == "local" or not topology.engine.sync:
        return
    folder = Path.cwd()
    try:
        require_inside(program_files(topology.job, None, folder), folder)
        packed = pack(folder, topology.engine.sync_limit)
    except UsageError as error:
        yield Finding("sync", False, str(error))
    else:
        size = format_size(max(1, len(packed) >> 10) << 10)
        yield Finding("sync", True, f"{folder} would be copied to every host: {size}, compressed")


def _ports(topology: Topology, placement: Placement) -> Iterator[Finding]:
    """Check that the range of ports suffices for the host with the most processes, which may also be the launching machine."""
    within = topology.job.port_range
    if within is None:
        return
    here = all(host.local for host in topology.hosts)
    processes = [len(placement.of_host(host.name)) + 1 for host in topology.hosts]
    needed = PORTS_EACH * ((sum(processes) if here else max(processes)) + 1)
    count = within[1] - within[0] + 1
    if count < needed:
        what = f"there are {count} ports from {within[0]} to {within[1]}, but the processes of one machine need up to {needed}"
        yield Finding("ports", False, what, "widen the range [job] ports")


def _port(topology: Topology) -> Finding:
    port = topology.job.port
    within = topology.job.port_range
    if port == 0:
        return Finding("port", True, "any free port" if within is None else f"any free port from {within[0]} to {within[1]}")
    with socket.socket() as probe:
        # As ZeroMQ does: a port that was closed a moment ago counts as free, a port with a listener does not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            why = f"{port} cannot be used ({error.strerror}): choose another [job] port, or leave it out to take any free one"
            return Finding("port", False, why)
    return Finding("port", True, f"{port} is free")


def _encryption(topology: Topology) -> Finding:
    wanted = topology.job.transport_encryption
    if wanted != "auto":
        return Finding("encryption", True, f"{'always' if wanted == 'required' else 'never'}, as set by [job] transport_encryption")
    if topology.engine.gathers:
        return Finding("encryption", True, "yes, as soon as a host on another machine joins")
    elsewhere = next((host for host in topology.hosts if not host.local), None)
    why = "all hosts are this machine" if elsewhere is None else f"{elsewhere.name} is at {elsewhere.address}"
    return Finding("encryption", True, f"{'no' if elsewhere is None else 'yes'}: {why}")


def _profile(topology: Topology) -> Iterator[Finding]:
    profile = topology.compute.profile
    if profile is None:
        return
    try:
        found = Profile.load(profile)
    except UsageError as error:
        yield Finding("profile", False, str(error))
    else:
        yield Finding("profile", True, f"{profile}, {found.numel} parameters in {len(found.layers)} layers")


def _network(topology: Topology) -> Iterator[Finding]:
    network = topology.network
    if network == Network():
        return
    nic = "no limit" if network.bandwidth is None else format_rate(network.bandwidth)
    parts = [f"{nic} per host, {format_duration(network.latency or 0.0)} one way"]
    if network.jitter:
        parts.append(f"{format_duration(network.jitter)} jitter")
    if network.loss:
        parts.append(f"loss {network.loss:g}")
    if network.racks:
        racks, uplinks = len(network.racks), sorted({rack.uplink for rack in network.racks})
        each = f"{format_rate(uplinks[0])}" if len(uplinks) == 1 else f"{format_rate(uplinks[0])} to {format_rate(uplinks[-1])}"
        parts.append(f"{racks} rack{'s' * (racks > 1)} with uplinks of {each}")
    special = sum(count(host.name) for host in network.hosts)
    if special:
        parts.append(f"{special} host{'s' * (special > 1)} with settings of their own")
    if network.links:
        parts.append(f"{len(network.links)} [[network.links]]")
    if network.dilation != 1:
        parts.append(f"emulated {network.dilation:g} times as slowly")
    yield Finding("network", True, f"{', '.join(parts)}: in simulate and launch --emulate")


def _simulation(topology: Topology, *, emulate: bool) -> Iterator[Finding]:
    simulation, faults = topology.simulation, topology.faults
    if topology.compute.device == "modelled" or faults or simulation != Simulation():
        trained = topology.job.task is not None and topology.compute.device != "modelled"
        payload = simulation.payload or ("real" if trained else "phantom")
        limit = format_duration(simulation.time_limit)
        yield Finding("simulation", True, f"{payload} payloads; stopped after {limit} of virtual time")
    if emulate and (why := refused(topology)):
        yield Finding("faults", False, "; ".join(why))
    elif faults:
        steps = topology.job.steps
        late = [] if steps is None else [f"{fault.kind} at step {fault.step}" for fault in faults if (fault.step or 0) >= steps]
        never = f"; too late, since there are only {steps} steps: {', '.join(late)}" if late else ""
        yield Finding("faults", True, f"{len(faults)} in simulated and emulated runs{never}")
