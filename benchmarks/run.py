"""Runs one benchmark by its name and prints its cases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zmqtrain.errors import UsageError

NAMES = (
    "net", "collectives", "server", "launch", "emulate", "simulate", "fidelity", "gossip", "host", "parallel", "merged", "cluster",
    "efficiency", "loader", "study", "planner", "predicted", "planned", "divided", "verified", "memory", "backend", "hooks",
    "dashboard", "mutations", "replicas", "moves", "teams", "coordinator", "soak", "failures", "quality", "compression", "accuracy",
)  # fmt: skip
#: Those of which parts may be run alone.
DIVIDED = ("cluster", "efficiency", "merged", "soak", "quality", "compression", "accuracy", "parallel")


def run_bench(
    name: str,
    *,
    json_lines: bool = False,
    encrypted: bool = False,
    mxnet_python: str | None = None,
    mxnet_script: str | None = None,
    mpi_python: str | None = None,
    mpi_script: str | None = None,
    torchft_python: str | None = None,
    peers_python: str | None = None,
    systems: Sequence[str] = (),
    parts: Sequence[str] = (),
    workers: Sequence[int] = (),
    data: str | None = None,
    quick: bool = False,
    minutes: float | None = None,
    every: float | None = None,
) -> int:
    """Print a row, or a JSON line, for each case as soon as it is measured. Raises `UsageError` for an unknown name.

    ``encrypted``: for ``net``, what encryption costs. ``parts``: some of the cases of those in `DIVIDED`; ``systems``: some of
    ``quality``'s, ``accuracy``'s or ``compression``'s; ``workers``: for ``efficiency``, with so many; ``data``: for those that
    train, where it is; ``quick``: for ``quality``, little of it; ``minutes`` and ``every``: for ``soak``, how long it takes, and
    the seconds between two faults."""
    if encrypted and name != "net":
        raise UsageError(f"benchmark {name} has no --encrypted: net has")
    if parts and name not in DIVIDED:
        raise UsageError(f"benchmark {name} has no --part: {', '.join(DIVIDED)} have")
    if (minutes or every) and name != "soak":
        raise UsageError(f"benchmark {name} has no --minutes and no --every: soak has")
    if systems and name not in ("quality", "accuracy", "compression"):
        raise UsageError(f"benchmark {name} has no --system: quality, accuracy and compression have")
    if quick and name != "quality":
        raise UsageError(f"benchmark {name} has no --quick: quality has")
    if workers and name != "efficiency":
        raise UsageError(f"benchmark {name} has no --workers: efficiency has")
    cases = (
        _in_parts(
            name,
            parts,
            workers,
            data or os.environ.get("ZMQTRAIN_DATA"),
            minutes,
            every,
            systems,
            (peers_python, mxnet_python, quick),
        )
        if name in DIVIDED
        else _cases(name, encrypted, (mxnet_python, mxnet_script), (mpi_python, mpi_script), torchft_python)
    )
    if json_lines:
        for case in cases:
            print(json.dumps(case), flush=True)
        return 0
    console = Console()
    measured = []
    for case in cases:
        measured.append(case)
        if console.is_terminal:
            console.print(f"measured: {case['case']}", style="dim", highlight=False)
    print_cases(measured, console)
    return 0


def print_cases(cases: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table of what was measured; two lines for each case where a table would not fit, since folded cells are hard to read."""
    headings = ("case", "value", "unit", "peer", "peer's", "ratio")
    rows = [_row(case) for case in cases]
    used = [i for i in range(len(headings)) if i < 3 or any(row[i] for row in rows)]  # without peers there are no columns for them
    table = Table(*(headings[i] for i in used), box=None, header_style="bold")
    for row in rows:
        table.add_row(*(escape(row[i]) for i in used))
    if Measurement.get(console, console.options.update(max_width=10**6), table).maximum <= console.width:
        console.print(table)
    else:
        for name, value, unit, peer, peer_value, ratio in rows:
            beside = f"; {peer}: {peer_value} {unit}".rstrip() + (f"; ratio {ratio}" if ratio else "") if peer else ""
            console.print(name, markup=False, highlight=False)
            console.print(Padding(Text(f"{value} {unit}{beside}"), (0, 0, 0, 4)))
    if 5 in used:
        console.print("ratio: above 1 means better than the peer, measured in the same run", style="dim")


def _row(case: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    ratio = case.get("ratio")
    return (
        str(case["case"]),
        _number(case["value"]),
        str(case["unit"]),
        str(case.get("peer") or ""),
        _number(case.get("peer_value")),
        "" if ratio is None else f"{ratio:.2f}",
    )


def _in_parts(
    name: str,
    parts: Sequence[str],
    workers: Sequence[int],
    data: str | None,
    minutes: float | None,
    every: float | None,
    systems: Sequence[str],
    quality_options: tuple[str | None, str | None, bool],
) -> Iterator[Mapping[str, Any]]:
    """Of those that have parts: these, or all."""
    if name == "soak":
        from benchmarks import soak

        return soak.bench_soak(minutes=minutes or soak.MINUTES, every=every or soak.EVERY_S, parts=parts)
    if name == "cluster":
        from benchmarks import cluster

        return cluster.bench_cluster(parts or cluster.PARTS, data=data)
    if name == "quality":
        from benchmarks import quality

        peers, mxnet, quick = quality_options
        return quality.bench_quality(parts, data=data, peers_python=peers, mxnet_python=mxnet, systems=systems, quick=quick)
    if name == "compression":
        from benchmarks import compression

        return compression.bench_compression(parts, data=data, ways=systems)
    if name == "accuracy":
        from benchmarks import accuracy

        return accuracy.bench_accuracy(parts, data=data, ways=systems)
    if name == "parallel":
        from benchmarks import parallel

        return parallel.bench_parallel(parts or parallel.PARTS)
    if name == "merged":
        from benchmarks import merged

        return merged.bench_merged(parts=parts or merged.PARTS)
    from benchmarks import efficiency

    return efficiency.bench_efficiency(parts=parts or efficiency.PARTS, workers=workers or efficiency.WORKERS)


#: A peer's Python, and the script that times it.
_Peer: TypeAlias = tuple[str | None, str | None]


def _cases(name: str, encrypted: bool, mxnet: _Peer, mpi: _Peer, torchft: str | None) -> Iterator[Mapping[str, Any]]:
    """Of one without parts: ``bench_NAME`` of the module with the benchmark's name."""
    if name not in NAMES:
        raise UsageError(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    if encrypted:
        from benchmarks.encrypted import bench_encrypted

        return iter(bench_encrypted())
    peers = {
        "server": {"mxnet_python": mxnet[0], "mxnet_script": mxnet[1]},
        "host": {"mpi_python": mpi[0], "mpi_script": mpi[1]},
        "failures": {"torchft_python": torchft},
    }
    return iter(getattr(import_module(f"benchmarks.{name}"), f"bench_{name}")(**peers.get(name, {})))


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,.4g}"
