"""What a file leaves open, decided before its run starts: ``[parallel] plan`` is read, ``[compute] grid = "auto"`` is planned, and
``[exchange] compression = "auto"`` becomes the way to compress that the cost model recommends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Plan
from zmqtrain.topology.rounded import rounded_size
from zmqtrain.topology.schema import Topology

#: The largest plan in bytes; a larger file is not a plan.
LARGEST_PLAN = 4 * 2**20


def read_plan(file: Path, option: str) -> Plan:
    """Read a plan that ``zmqtrain plan --save`` wrote. ``option``: the option or setting that errors name. Raises `UsageError`."""
    try:
        if file.stat().st_size > LARGEST_PLAN:
            raise UsageError(f"{option} {file}: it is larger than {rounded_size(LARGEST_PLAN)}, so it cannot be a plan")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {file} cannot be read as a plan: {error}") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UsageError(
            f'{option} {file}: this is not a plan, which is a list of {{"layer": NAME, "choice": CHOICE, "grid": "PRxPC"}}'
        )
    return Plan.read(values)


def decided(topology: Topology, folder: Path, data: str | None = None, tell: Callable[[str], None] = lambda text: None) -> Topology:
    """The topology with its grid, plan and compression filled in, so that nothing is left to decide.

    ``folder``: where the file of the plan is looked for. ``data``: the value of ``--data``. ``tell``: takes a sentence on the
    compression. Raises `UsageError` if no plan can be read or made, `TaskError` if the task's code fails.
    """
    topology = _divided(topology, folder, data)
    return topology if topology.exchange.compression != "auto" else _compressed(topology, data, tell)


def _compressed(topology: Topology, data: str | None, tell: Callable[[str], None]) -> Topology:
    from zmqtrain.plan.compressed import chosen, compressed, reason
    from zmqtrain.plan.setup import link_source, source_of

    source = source_of(topology, data)
    ways = compressed(topology, source.layers)
    found = chosen(topology, ways)
    name = "none" if found is None else found.way.name
    tell(f'compression = "{name}": {reason(ways, found)} (as predicted for {source.what} and {link_source(topology)})')
    values = topology.to_open_dict()
    values["exchange"]["compression"] = name
    if name != "powersgd":
        values["exchange"].pop("compression_rank", None)
    try:
        return Topology.from_dict(values)
    except ValidationError as error:
        faults = "; ".join(each["msg"] for each in error.errors())
        raise UsageError(f'compression = "auto" is {name} here, which this job cannot have: {faults}') from error


def _divided(topology: Topology, folder: Path, data: str | None) -> Topology:
    compute, parallel = topology.compute, topology.parallel
    if parallel.plan is not None:
        return _with(topology, compute.grid, read_plan(folder / parallel.plan, "[parallel] plan"))
    if compute.grid != "auto":
        return topology
    from zmqtrain.plan.planner import plan
    from zmqtrain.plan.setup import problem_of, source_of

    return with_plan(topology, plan(problem_of(topology, source_of(topology, data).stages)).plan)


def with_plan(topology: Topology, best: Plan) -> Topology:
    """The topology with a plan of the planner's, and its grid."""
    from zmqtrain.parallel.placed.assign import main_grid

    grid = main_grid(best, Grid(1, topology.compute.group_size))
    return _with(topology, str(grid), best if grid.rows > 1 else None)


def _with(topology: Topology, grid: str | None, plan: Plan | None) -> Topology:
    values = topology.to_open_dict()
    values["compute"]["grid"] = grid
    values["parallel"] = {**values["parallel"], "plan": None, "layers": plan.values() if plan else []}
    if plan is None and topology.parallel.statistics != "whole":  # nothing is divided that these could be about
        del values["parallel"]["whole"], values["parallel"]["strict"]
    try:
        return Topology.from_dict(values)
    except ValidationError as error:
        found = "; ".join(each["msg"] for each in error.errors())
        raise UsageError(f"the plan that was found divides a group as {grid}, which this job cannot have: {found}") from error
