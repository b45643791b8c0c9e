"""The grid and the plan of a run, decided before it starts: ``[parallel] plan`` is read, ``[compute] grid = "auto"`` is planned."""

from __future__ import annotations

import json
from pathlib import Path

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Plan
from zmqtrain.topology.schema import Topology

#: A plan's file is small; anything larger is another file.
LARGEST_PLAN = 4 * 2**20


def read_plan(file: Path, option: str) -> Plan:
    """A plan as ``zmqtrain plan --save`` writes it. ``option`` names the file, in errors. Raises `UsageError`."""
    try:
        if file.stat().st_size > LARGEST_PLAN:
            raise UsageError(f"{option} {file}: it is larger than {LARGEST_PLAN} bytes, which is no plan")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {file} cannot be read as a plan: {error}") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UsageError(f'{option} {file}: a plan is a list of {{"layer": NAME, "choice": CHOICE, "grid": "PRxPC"}}')
    return Plan.read(values)


def decided(topology: Topology, folder: Path, data: str | None = None) -> Topology:
    """The topology with its grid and plan written out, so that nothing is left to be decided.

    ``folder``: where a plan's file is looked for. Raises `UsageError` where there is no plan.
    """
    compute, parallel = topology.compute, topology.parallel
    if parallel.plan is not None:
        return _with(topology, compute.grid, read_plan(folder / parallel.plan, "[parallel] plan"))
    if compute.grid != "auto":
        return topology
    from zmqtrain.parallel.rewrite.assign import main_grid
    from zmqtrain.plan.planner import plan
    from zmqtrain.plan.setup import problem_of, source_of

    best = plan(problem_of(topology, source_of(topology, data).stages)).plan
    grid = main_grid(best, Grid(1, compute.group_size))
    return _with(topology, str(grid), best if grid.rows > 1 else None)


def _with(topology: Topology, grid: str | None, plan: Plan | None) -> Topology:
    values = topology.to_open_dict()
    values["compute"]["grid"] = grid
    values["parallel"] = {**values["parallel"], "plan": None, "layers": plan.values() if plan else []}
    return Topology.from_dict(values)
