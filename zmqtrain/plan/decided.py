"""The grid and the plan of a run, decided before it starts: ``[parallel] plan`` is read, and ``[compute] grid = "auto"`` is
planned."""

from __future__ import annotations

import json
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
            f'{option} {file}: this is not a plan, which is a list of {{"layer": NAME, "choice": CHOICE, "grid": "PRxPC"}}}}'
        )
    return Plan.read(values)


def decided(topology: Topology, folder: Path, data: str | None = None) -> Topology:
    """The topology with its grid and plan filled in, so that nothing is left to decide.

    ``folder``: where the file of the plan is looked for. Raises `UsageError` if no plan can be read or made.
    """
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
    try:
        return Topology.from_dict(values)
    except ValidationError as error:
        found = "; ".join(each["msg"] for each in error.errors())
        raise UsageError(f"the plan that was found divides a group as {grid}, which this job cannot have: {found}") from error
