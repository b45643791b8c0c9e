"""``zmqtrain check FILE``: what a launch of the file would do, and what stands in its way. Starts and imports nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zmqtrain.errors import PlacementError, TopologyError, UsageError
from zmqtrain.topology.faults import TopologyFaultsError
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.ranges import count
from zmqtrain.topology.schema import Fault, Network, Simulation, Topology
from zmqtrain.topology.timeouts import Ladder
from zmqtrain.topology.toml_writer import write_value
from zmqtrain.topology.units import format_duration, format_rate
from zmqtrain.train.device.profile import Profile

#: What all hosts must have in the same version, beside zmqtrain and Python.
PACKAGES = ("zmqtrain", "torch", "pyzmq", "msgpack", "numpy")
FAULTY = 2
#: Of a table that people see; there may be thousands of hosts and roles.
MOST_ROWS = 40
_DETAILS = ("to", "sides", "one_way", "factor", "lasts")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    """What is there; where not ``ok``, what is wrong and what to do."""


def run_check(path: str | Path, json: bool = False, *, data: str | None = None) -> int:
    """Check a topology file and print what was found. The exit code is 0, or 2 if anything would keep it from running.

    ``data``: what ``--data`` would say at the launch.
    """
    try:
        topology = load_topology(path)
    except TopologyError as error:
        return _print_faults(error, json)
    findings: list[Finding] = []
    placement: Placement | None = None
    try:
        placement = place(topology)
        findings.append(_slots(topology, placement))
    except PlacementError as error:
        findings.append(Finding("placement", False, str(error)))
    findings += [_task(topology), *_data(topology, data), _port(topology), *_profile(topology)]
    findings += [_encryption(topology), *_network(topology), *_simulation(topology)]
    rows = list(_rows(topology, placement, findings))
    ok = all(finding.ok for finding in findings)
    if json:
        for row in rows:
            print(dumps(row))
        print(dumps({"row": "result", "file": str(path), "ok": ok, "faults": sum(not finding.ok for finding in findings)}))
    else:
        _print_tables(rows, ok, str(path))
    return 0 if ok else FAULTY


# What is looked at ------------------------------------------------------------------------------------------------------------


def _slots(topology: Topology, placement: Placement) -> Finding:
    slots = sum(host.slots for host in topology.hosts)
    shared = " (oversubscribed: they share the processors)" if placement.world_size > slots else ""
    beside = f"{placement.servers} model servers" + (f" and {placement.fc_servers} FC server" if placement.fc_servers else "")
    return Finding("slots", True, f"{placement.world_size} workers on {slots} slots{shared}, {beside} beside")


def _task(topology: Topology) -> Finding:
    if topology.job.task is None and topology.compute.device == "modelled":
        return Finding("task", True, "none: devices are modelled")
    if topology.job.task is None:
        return Finding("task", True, "none: launch this file with a script, or set [job] task")
    try:
        place = find_task(topology.job.task, (".", *topology.job.python_path))
    except UsageError as error:
        return Finding("task", False, str(error))
    return Finding("task", True, f"{place.function} in {place.file}")


def _data(topology: Topology, given: str | None) -> Iterator[Finding]:
    for source, path in (
        ("--data", given),
        ("ZMQTRAIN_DATA", os.environ.get("ZMQTRAIN_DATA")),
        ("[data] path", topology.data.path),
    ):
        if path:
            there = Path(path).exists()
            detail = f"{path} ({source})" if there else f"{path} does not exist here: mend {source}. It must be there on every host"
            yield Finding("data", there, detail)
            return


def _port(topology: Topology) -> Finding:
    port = topology.job.port
    if port == 0:
        return Finding("port", True, "any free one")
    with socket.socket() as probe:
        # As ZeroMQ does: a port that was closed a moment ago is free, one that is listened on is not.
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
        return Finding("encryption", True, f"{'always' if wanted == 'required' else 'never'}, as [job] transport_encryption says")
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
    card = "no limit" if network.bandwidth is None else format_rate(network.bandwidth)
    parts = [f"{card} a host, {format_duration(network.latency or 0.0)} one way"]
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
        parts.append(f"{special} host{'s' * (special > 1)} with figures of their own")
    if network.links:
        parts.append(f"{len(network.links)} [[network.links]]")
    if network.dilation != 1:
        parts.append(f"emulated {network.dilation:g} times as slowly")
    yield Finding("network", True, f"{', '.join(parts)}: in simulate and launch --emulate")


def _simulation(topology: Topology) -> Iterator[Finding]:
    simulation, faults = topology.simulation, topology.faults
    if topology.compute.device == "modelled" or faults or simulation != Simulation():
        trained = topology.job.task is not None and topology.compute.device != "modelled"
        payload = simulation.payload or ("real" if trained else "phantom")
        limit = format_duration(simulation.time_limit)
        yield Finding("simulation", True, f"{payload} payloads; given up after {limit} of virtual time")
    if faults:
        steps = topology.job.steps
        late = [] if steps is None else [f"{fault.kind} at step {fault.step}" for fault in faults if (fault.step or 0) >= steps]
        never = f"; never comes, as there are {steps} steps: {', '.join(late)}" if late else ""
        yield Finding("faults", True, f"{len(faults)} in simulated runs{never}")


def _planned(fault: Fault) -> dict[str, Any]:
    """One of ``[[faults]]`` as a row."""
    details = [
        f"{name} = {write_value(value)}" for name, value in fault.model_dump(mode="json").items() if name in _DETAILS and value
    ]
    return {"kind": fault.kind, "at": fault.at, "step": fault.step, "target": fault.target, "details": ", ".join(details)}


def _versions() -> Iterator[tuple[str, str | None]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, None


# How it is shown --------------------------------------------------------------------------------------------------------------


def _rows(topology: Topology, placement: Placement | None, findings: list[Finding]) -> Iterator[dict[str, Any]]:
    for host in topology.hosts:
        roles = placement.of_host(host.name) if placement else ()
        workers = sum(role.kind == "worker" for role in roles)
        yield {
            **{"row": "host", "name": host.name, "address": host.address, "slots": host.slots, "devices": list(host.devices)},
            **{"workers": workers, "servers": len(roles) - workers},
        }
    for role in placement.roles if placement else ():
        yield {"row": "role", **asdict(role)}
    for rung in Ladder.of(topology.job.timeout).rows():
        yield {"row": "timeout", **asdict(rung)}
    for fault in topology.faults:
        yield {"row": "planned", **_planned(fault)}
    for package, version in _versions():
        yield {"row": "version", "package": package, "version": version}
    for finding in findings:
        yield {"row": "check", **asdict(finding)}


#: The kinds of rows: title, columns as (heading, key).
_TABLES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "host",
        "Hosts",
        (
            ("name", "name"),
            ("address", "address"),
            ("slots", "slots"),
            ("devices", "devices"),
            ("workers", "workers"),
            ("servers", "servers"),
        ),
    ),
    (
        "role",
        "Placement",
        (
            ("role", "kind"),
            ("rank", "index"),
            ("group", "group"),
            ("position", "position"),
            ("host", "host"),
            ("local rank", "local_rank"),
            ("device", "device"),
            ("threads", "threads"),
        ),
    ),
    (
        "timeout",
        "Time-outs, all from \\[job] timeout",
        (("time-out", "name"), ("seconds", "seconds"), ("how long until", "purpose")),
    ),
    (
        "planned",
        "Faults in simulated runs",
        (("fault", "kind"), ("at (s)", "at"), ("at step", "step"), ("target", "target"), ("details", "details")),
    ),
    ("version", "Versions on this machine", (("package", "package"), ("version", "version"))),
)


def _cell(key: str, value: Any) -> str:
    if value in (None, "", []) or (key in ("group", "position") and value == -1):
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _print_tables(rows: list[dict[str, Any]], ok: bool, file: str) -> None:
    console = Console()
    for kind, title, columns in _TABLES:
        table = Table(box=None, header_style="dim")
        for heading, _ in columns:
            table.add_column(heading)
        here = [row for row in rows if row["row"] == kind]
        for row in here[:MOST_ROWS]:
            table.add_row(*(escape(_cell(key, row[key])) for _, key in columns))
        if table.row_count:
            console.print(title, style="bold", highlight=False)
            console.print(table)
            if len(here) > MOST_ROWS:
                console.print(f"and {len(here) - MOST_ROWS} more (all with --json)", highlight=False)
            console.print()
    for row in rows:
        if row["row"] == "check":
            mark = "[green]ok[/]   " if row["ok"] else "[red]FAULT[/]"
            console.print(f"{mark} {row['name']}: {escape(row['detail'])}", soft_wrap=True, highlight=False)
    verdict = "[green]is ready to launch[/]" if ok else "[red]would not run: mend the faults above[/]"
    console.print(f"{escape(file)} {verdict}", soft_wrap=True, highlight=False)


def _print_faults(error: TopologyError, json: bool) -> int:
    if json:
        faults = error.faults if isinstance(error, TopologyFaultsError) else ()
        for fault in faults:
            print(dumps({"row": "fault", **fault.to_dict()}))
        print(dumps({"row": "result", "ok": False, "faults": len(faults), "message": str(error)}))
    else:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
    return FAULTY
