"""What the report on the hosts (`zmqtrain.launcher.preflight`) means for a run: problems, and what to do. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from zmqtrain.exchange.momentum import expected_staleness
from zmqtrain.launcher.check.file import Finding
from zmqtrain.launcher.preflight import HostReport, PreflightReport, WayReport
from zmqtrain.launcher.ssh.inspection import public_version
from zmqtrain.topology.loopback import is_loopback
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.rounded import rounded_rate, rounded_size, rounded_time
from zmqtrain.topology.schema import Topology

#: If clocks differ by more, events appear in a wrong order, and a step's spans do not line up in the trace.
MOST_CLOCK_S = 1.0
#: Bytes that a run writes on a host besides the copied folder: an agent's log.
LEAST_DISK_BYTES = 64 << 20
#: The least shared memory for torch's data loaders with processes of their own; containers often have less.
LEAST_SHM_BYTES = 256 << 20
#: A link with less than this fraction of the median bandwidth is reported.
SLOW_WAY = 0.5
#: Copies of the model that a worker (parameters, gradients, momentum) and a server (parameters, momentum) need at least.
WORKER_COPIES, SERVER_COPIES = 3, 2
#: A server with look-ahead needs two more: the offset, and a buffer to compute it.
AHEAD_COPIES = 2
_FIREWALL = "open the ports between hosts ([job] ports says which), or give addresses on a network that they share"


def findings_of(
    topology: Topology, placement: Placement | None, look: PreflightReport, ours: Mapping[str, str | None], model_bytes: int
) -> Iterator[Finding]:
    """Return the findings. ``ours``: the versions here, by package. ``model_bytes``: bytes of the parameters; 0: not known."""
    for fault in look.faults:
        yield Finding("hosts", False, fault.what, fault.remedy, fault.host)
    yield from _ways(topology, look)
    for host in look.hosts:
        yield from _versions(host, ours)
        yield from _names(topology, host)
        yield from _clock(host)
        yield from _disk(topology, host)
        yield from _memory(topology, placement, host, model_bytes)
        yield from _data(host)
        yield from _gpus(topology, placement, host)
    yield from _summary(look)


# The checks ---------------------------------------------------------------------------------------------------------------------


def _ways(topology: Topology, look: PreflightReport) -> Iterator[Finding]:
    addresses = {host.name: host.address for host in topology.hosts}
    for way in look.ways:
        if way.why:
            yield Finding("ways", False, f"cannot reach {way.target} at {addresses[way.target]} ({way.why})", _FIREWALL, way.source)
    if not look.ways:
        return
    if not any(way.why for way in look.ways):
        keys = "keys were exchanged, everything is encrypted" if look.encrypted else "not encrypted"
        yield Finding("ways", True, f"every host reaches the others ({len(look.ways)} links): {keys}")
    rates = {way: way.bandwidth for way in look.ways if way.bandwidth}
    if rates:
        usual = statistics.median(rates.values())
        yield from (_slow(way, rate, usual) for way, rate in rates.items() if rate < SLOW_WAY * usual)


def _slow(way: WayReport, rate: float, usual: float) -> Finding:
    what = f"its link to {way.target} carries {rounded_rate(rate)}, but most links carry {rounded_rate(usual)}"
    return Finding(
        "bandwidth", True, what, "check the cable, the NIC's speed (ethtool), and other traffic on this link", way.source
    )


def _versions(host: HostReport, ours: Mapping[str, str | None]) -> Iterator[Finding]:
    for package, there in host.facts["packages"].items():
        here = ours.get(package)
        if here is not None and there is not None and public_version(there) != public_version(here):
            wanted = f"pip install {package}=={public_version(here)}"
            yield Finding(
                "versions",
                True,
                f"{package} {there}, but this machine has {here}",
                f"if there are problems: {wanted}",
                host.name,
            )


def _names(topology: Topology, host: HostReport) -> Iterator[Finding]:
    own = next(other.address for other in topology.hosts if other.name == host.name)
    for address, means in host.facts["names"].items():
        if not means:
            yield Finding(
                "names", False, f"cannot resolve {address}", "correct address in [[hosts]], or the host's name server", host.name
            )
        elif address != own and means[0] != address and is_loopback(means[0]):
            what = f"resolves {address} to {means[0]}, its own loopback address"
            yield Finding("names", False, what, "correct its /etc/hosts, or give an IP address in [[hosts]]", host.name)


def _clock(host: HostReport) -> Iterator[Finding]:
    if abs(host.clock_offset_s) - host.clock_error_s > MOST_CLOCK_S:
        ahead = "ahead of" if host.clock_offset_s > 0 else "behind"
        what = (
            f"its clock is {rounded_time(abs(host.clock_offset_s))} {ahead} the one here: events and traces would be out of order"
        )
        yield Finding(
            "clocks", False, what, "synchronize it with a time server (timedatectl set-ntp true; chronyc makestep)", host.name
        )


def _gpus(topology: Topology, placement: Placement | None, host: HostReport) -> Iterator[Finding]:
    """Check for GPUs that a host has but the file does not name, and for those that the file asks for but the host does not
    have."""
    device, there = topology.compute.device, int(host.facts.get("gpus", 0))
    listed = next((each.devices for each in topology.hosts if each.name == host.name), ())
    if placement is None or device not in ("auto", "cuda") or topology.engine.kind == "local":
        return
    workers = sum(role.kind == "worker" for role in placement.of_host(host.name))
    if not listed and workers < there:
        what = f"{there - workers} of its {there} GPUs would be idle: each of its {workers} workers uses one"
        names = ", ".join(f'"cuda:{number}"' for number in range(there))
        yield Finding("idle", True, what, f"list them in [[hosts]]: devices = [{names}]", host.name, warning=True)
    elif workers and not there and (device == "cuda" or any(name.startswith("cuda") for name in listed)):
        what = "it has no NVIDIA device that can be seen, but workers are to compute on CUDA"
        yield Finding(
            "device", True, what, "check whether nvidia-smi finds one there, or choose another device", host.name, warning=True
        )


def _disk(topology: Topology, host: HostReport) -> Iterator[Finding]:
    needed = LEAST_DISK_BYTES + (2 * topology.engine.sync_limit if topology.engine.sync else 0)
    folder, free = host.facts["run_folder"]
    if free < needed:
        what = f"only {rounded_size(free)} free in {folder}, but a run may write {rounded_size(needed)}"
        yield Finding("disk", False, what, "free some space, or set environment = { XDG_STATE_HOME = ... } in [[hosts]]", host.name)
    folder, free = host.facts["scratch_folder"]
    if free < LEAST_DISK_BYTES:
        what = f"only {rounded_size(free)} free in {folder}"
        yield Finding("disk", False, what, "free some space, or set environment = { TMPDIR = ... } in [[hosts]]", host.name)


def _memory(topology: Topology, placement: Placement | None, host: HostReport, model_bytes: int) -> Iterator[Finding]:
    roles = placement.of_host(host.name) if placement is not None else ()
    workers = sum(role.kind == "worker" for role in roles)
    missing = host.facts["shared_memory_missing"]
    if missing and topology.compute.shared_memory and workers > 1:
        what = f"{missing}: its {workers} workers would exchange everything over sockets"
        yield Finding("shared memory", True, what, "use Linux 3.17 (2014) or later, on x86_64 or aarch64", host.name)
    shm = host.facts["shm_bytes"]
    if shm is not None and shm < LEAST_SHM_BYTES and workers:
        what = f"/dev/shm has {rounded_size(shm)}; zmqtrain does not need it, but data loaders with processes of their own do"
        yield Finding("shared memory", True, what, "for containers use --shm-size=1g, or set num_workers=0", host.name)
    servers = len(roles) - workers
    copies = SERVER_COPIES + AHEAD_COPIES * _looks_ahead(topology, placement)
    needed = model_bytes * (WORKER_COPIES * workers + copies * servers // max(1, topology.exchange.shards))
    if needed > host.facts["memory_bytes"]:
        free = rounded_size(host.facts["memory_bytes"])
        what = f"{free} of memory free, but the model's copies in {len(roles)} roles need {rounded_size(needed)}"
        yield Finding("memory", False, what, "give it fewer slots, or place servers elsewhere", host.name)


def _looks_ahead(topology: Topology, placement: Placement | None) -> bool:
    """Whether model servers use look-ahead."""
    if placement is None or topology.optimizer.look_ahead != "auto" or topology.optimizer.momentum != "auto":
        return False
    return expected_staleness(topology.exchange.policy, placement.groups, topology.exchange.bound or 0) > 0


def _data(host: HostReport) -> Iterator[Finding]:
    for path, there in host.facts["paths"].items():
        if not there:
            yield Finding(
                "data", False, f"no {path}", "put the data there, or set ZMQTRAIN_DATA or --data to where it is", host.name
            )


def _summary(look: PreflightReport) -> Iterator[Finding]:
    """Findings about what is in order on all hosts that were checked."""
    if not look.hosts:
        return
    furthest = max(look.hosts, key=lambda host: abs(host.clock_offset_s))
    if abs(furthest.clock_offset_s) - furthest.clock_error_s <= MOST_CLOCK_S:
        how = f"{rounded_time(abs(furthest.clock_offset_s))} from the one here, ± {rounded_time(furthest.clock_error_s)}"
        yield Finding("clocks", True, f"the clock that differs most ({furthest.name}) is {how}")
    rates = [(way.bandwidth, way.round_trip_s) for way in look.ways if way.bandwidth and way.round_trip_s]
    if rates:
        trips: Sequence[float] = [trip for _, trip in rates]
        slowest = min(rate for rate, _ in rates)
        yield Finding(
            "network", True, f"{rounded_rate(slowest)} or more on each link, round trips of {rounded_time(max(trips))} at most"
        )
