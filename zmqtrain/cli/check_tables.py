"""The results of `zmqtrain check`, as JSON rows and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from json import dumps
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zmqtrain.errors import TopologyError
from zmqtrain.launcher.check.file import Finding
from zmqtrain.launcher.preflight import HostReport, PreflightReport
from zmqtrain.topology.faults import TopologyFaultsError
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.rounded import rounded_rate, rounded_size, rounded_time
from zmqtrain.topology.schema import Fault, Topology
from zmqtrain.topology.toml_writer import write_value
from zmqtrain.versions import PACKAGES, versions

#: The most rows of a printed table; there may be thousands of hosts and roles.
MOST_ROWS = 40
#: Links between up to this many hosts are printed as a matrix, those between more hosts as a list.
LARGEST_MATRIX = 8
_DETAILS = ("to", "sides", "one_way", "factor", "lasts")


def _planned(fault: Fault) -> dict[str, Any]:
    """The row of one entry of ``[[faults]]``."""
    details = [
        f"{name} = {write_value(value)}" for name, value in fault.model_dump(mode="json").items() if name in _DETAILS and value
    ]
    return {"kind": fault.kind, "at": fault.at, "step": fault.step, "target": fault.target, "details": ", ".join(details)}


def rows_of(
    topology: Topology, placement: Placement | None, look: PreflightReport | None, findings: Sequence[Finding]
) -> Iterator[dict[str, Any]]:
    """All results as rows; ``row`` is the kind of each row."""
    for host in topology.hosts:
        roles = placement.of_host(host.name) if placement else ()
        workers = sum(role.kind == "worker" for role in roles)
        yield {
            **{"row": "host", "name": host.name, "address": host.address, "slots": host.slots, "devices": list(host.devices)},
            **{"workers": workers, "servers": len(roles) - workers},
        }
    for role in placement.roles if placement else ():
        yield {"row": "role", **asdict(role)}
    for rung in topology.job.timeouts.rows():
        yield {"row": "timeout", **asdict(rung)}
    for fault in topology.faults:
        yield {"row": "planned", **_planned(fault)}
    found = versions()
    for package in ("python", *PACKAGES):
        version = found.get(package)
        yield {"row": "version", "package": package, "version": version}
    if look is not None:
        yield from map(machine_row, look.hosts)
        yield from (way.row() for way in look.ways)
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
        "Faults in simulated and emulated runs",
        (("fault", "kind"), ("at (s)", "at"), ("at step", "step"), ("target", "target"), ("details", "details")),
    ),
    (
        "machine",
        "Hosts",
        (
            ("host", "host"),
            ("clock ahead by", "clock"),
            ("free memory", "memory"),
            ("/dev/shm", "shm"),
            ("free for the run", "run_folder"),
            ("free for scratch", "scratch_folder"),
        ),
    ),
    ("version", "Versions on this machine", (("package", "package"), ("version", "version"))),
)


def _cell(key: str, value: Any) -> str:
    """A row's value as the text of a cell."""
    if value in (None, "", []) or (key in ("group", "position") and value == -1):
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_tables(rows: list[dict[str, Any]], ok: bool, file: str) -> None:
    """Print all rows as tables; problems, and what to do about them, come last."""
    console = Console()
    for kind, title, columns in _TABLES:
        table = Table(box=None, header_style="dim")
        for heading, _ in columns:
            table.add_column(heading)
        here = [machine_cells(row) if kind == "machine" else row for row in rows if row["row"] == kind]
        for row in here[:MOST_ROWS]:
            table.add_row(*(escape(_cell(key, row[key])) for _, key in columns))
        if table.row_count:
            console.print(title, style="bold", highlight=False)
            console.print(table)
            if len(here) > MOST_ROWS:
                console.print(f"and {len(here) - MOST_ROWS} more (all with --json)", highlight=False)
            console.print()
    _print_ways(console, [row for row in rows if row["row"] == "way"])
    checks = [row for row in rows if row["row"] == "check"]
    for row in checks:
        if not row["remedy"]:
            mark = "[green]ok[/]   " if row["ok"] else "[red]FAULT[/]"
            console.print(f"{mark} {row['name']}: {escape(row['detail'])}", soft_wrap=True, highlight=False)
    _print_remedies(console, [row for row in checks if row["remedy"]])
    warned = sum(row["warning"] for row in checks)
    ready = f"is ready to launch, with {warned} warning{'s' * (warned > 1)}" if warned else "is ready to launch"
    verdict = f"[{'yellow' if warned else 'green'}]{ready}[/]" if ok else "[red]cannot be launched: fix the problems above[/]"
    console.print(f"{escape(file)} {verdict}", soft_wrap=True, highlight=False)


def _print_ways(console: Console, ways: list[dict[str, Any]]) -> None:
    """Print the links between hosts: a matrix for few hosts, a list for many."""
    names = list(dict.fromkeys(row["source"] for row in ways))
    cells = {(row["source"], row["target"]): _way(row) for row in ways}
    if not ways:
        return
    table = Table(box=None, header_style="dim")
    if len(names) <= LARGEST_MATRIX:
        console.print("Links from each host to each other: bandwidth and round-trip time", style="bold", highlight=False)
        for heading in ("from", *(f"to {name}" for name in names)):
            table.add_column(escape(heading), no_wrap=True)
        for source in names:
            table.add_row(escape(source), *(cells.get((source, target), "-") for target in names))
    else:
        console.print("Links between hosts: bandwidth and round-trip time", style="bold", highlight=False)
        table.add_column("from")
        table.add_column("to")
        table.add_column("")
        measured = [row for row in ways if row["bandwidth"] is not None or not row["ok"]]
        for row in measured[:MOST_ROWS]:
            table.add_row(escape(row["source"]), escape(row["target"]), _way(row))
    console.print(table)
    console.print()


def _way(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return "[red]none[/]"
    if row["bandwidth"] is None:
        return "reached"
    return f"{rounded_rate(row['bandwidth'])}, {rounded_time(row['round_trip_s'])}"


def _print_remedies(console: Console, checks: list[dict[str, Any]]) -> None:
    """Print problems and possible improvements, with what to do about each."""
    if not checks:
        return
    table = Table(box=None, header_style="dim")
    for heading in ("", "host", "problem", "what to do"):
        table.add_column(heading, overflow="fold")
    for row in sorted(checks, key=lambda row: (bool(row["ok"]), not row["warning"])):
        mark = ("[yellow]warning[/]" if row["warning"] else "[yellow]note[/]") if row["ok"] else "[red]FAULT[/]"
        table.add_row(mark, escape(row["host"] or "-"), escape(row["detail"]), escape(row["remedy"]))
    console.print()
    console.print(table)
    console.print()


def print_faults(error: TopologyError, json: bool) -> None:
    """Print the errors of the file itself."""
    if json:
        faults = error.faults if isinstance(error, TopologyFaultsError) else ()
        for fault in faults:
            print(dumps({"row": "fault", **fault.to_dict()}))
        print(dumps({"row": "result", "ok": False, "faults": len(faults), "message": str(error)}))
    else:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


def machine_row(host: HostReport) -> dict[str, Any]:
    """A host as a JSON line."""
    clock = {"clock_offset_s": host.clock_offset_s, "clock_error_s": host.clock_error_s}
    return {"row": "machine", "host": host.name, **clock, **host.facts}


def machine_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a host's row in the printed table."""
    return {
        "host": row["host"],
        "clock": f"{rounded_time(row['clock_offset_s'])} ± {rounded_time(row['clock_error_s'])}",
        "memory": rounded_size(row["memory_bytes"]),
        "shm": "-" if row["shm_bytes"] is None else rounded_size(row["shm_bytes"]),
        "run_folder": f"{rounded_size(row['run_folder'][1])}",
        "scratch_folder": f"{rounded_size(row['scratch_folder'][1])} ({row['scratch_folder'][0]})",
    }
