"""Plans for programs and notebooks::

best = zmqtrain.plan("cluster.toml", group_size=8)
best.step_s                                     # of a compute group, in seconds
best.plot()                                     # shown by a notebook; .save("plan.svg") elsewhere
zmqtrain.launch(best.job)                       # the job, divided so
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmqtrain.charts import Bar, Bars, draw
from zmqtrain.notebook import paragraph, table
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.assign import main_grid
from zmqtrain.parallel.plan import Plan
from zmqtrain.plan.bars import panels
from zmqtrain.plan.decided import with_plan
from zmqtrain.plan.efficiency import efficiencies
from zmqtrain.plan.group_step import variants
from zmqtrain.plan.planner import Planned
from zmqtrain.plan.planner import plan as planned_for
from zmqtrain.plan.rows import efficiency_rows, layer_rows, link_row, total_rows
from zmqtrain.plan.setup import link_source, problem_of, source_of
from zmqtrain.svg import Picture
from zmqtrain.topology.rounded import rounded_rate, rounded_time
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.target import Target, job_of
from zmqtrain.words import counted

_GROUPS = {"compute": "#bbbbbb", "waits for the network": "#d55e00", "waits for other groups": "#56b4e9"}


def plan(
    target: Target, *, data: str | os.PathLike[str] | None = None, set: Mapping[str, Any] | None = None, **settings: Any
) -> JobPlan:
    """The best way to divide a compute group's layers, and how fast other numbers of groups would be. Nothing is run.

    Args:
        target: the job, as for `launch`: a topology file, a `Topology`, a mapping, a task or its function.
        data: where the task finds its data.
        set: other values that replace those of the target, by ``section.key``.
        settings: keys of ``[job]`` and ``[compute]``, and whole sections, as for `launch`.

    Raises:
        UsageError: there is no such job or setting, there is nothing to plan for, or no plan fits in memory.
        TaskError: the task's own code fails.
    """
    topology = job_of(target, settings, set or {}, caller="plan").topology
    source = source_of(topology, None if data is None else os.fspath(data))
    problem = problem_of(topology, source.stages)
    groups: list[dict[str, Any]] = []
    if topology.compute.workers > 1:
        for name, model in variants(topology, source.layers).items():
            groups += efficiency_rows(name, efficiencies(model))
    return JobPlan(topology, planned_for(problem), link_row(source.what, problem, link_source(topology)), groups)


@dataclass(frozen=True, slots=True, repr=False)
class JobPlan:
    """How a job is best divided. Made by `plan`; notebooks show its tables and its picture."""

    topology: Topology
    planned: Planned
    given: dict[str, Any]
    """What the plan is for, and the speeds that it assumes: the first line of ``zmqtrain plan --json``."""
    groups: list[dict[str, Any]]
    """How fast the workers would be in other numbers of groups: the ``groups`` lines of ``zmqtrain plan --json``."""

    @property
    def step_s(self) -> float:
        """Seconds of a step of one compute group, as the cost model has it."""
        return self.planned.price.step_s

    @property
    def plan(self) -> Plan:
        """How each layer is divided, for `parallelize`."""
        return self.planned.plan

    @property
    def grid(self) -> str:
        """The grid of a compute group, for `parallelize`."""
        return str(main_grid(self.plan, Grid(1, self.planned.problem.processes)))

    @property
    def job(self) -> Topology:
        """The job with this plan and its grid, to launch or to simulate."""
        return with_plan(self.topology, self.plan)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """A row for each layer: its placement and costs, and the alternatives."""
        return list(layer_rows(self.planned))

    @property
    def totals(self) -> list[dict[str, Any]]:
        """The plan's totals, and those of dividing only the batch or only the model."""
        return total_rows(self.planned, "planned")

    def plot(self) -> Picture:
        """The parts of a step under each grid beside the plan's; and the time of an update with each number of groups."""
        divided = panels([self.planned]) if self.planned.problem.processes > 1 else []
        return draw(f"{self.topology.job.name}: {self.given['layers']}", [*divided, *self._groups()])

    def _groups(self) -> list[Bars]:
        found: list[Bars] = []
        for variant in dict.fromkeys(row["variant"] for row in self.groups):
            rows = [row for row in self.groups if row["variant"] == variant]
            bars = [Bar(_shape(row), _parts(row), row["saturation"]) for row in rows]
            title = "an update, with so many groups of so many workers (* the fewest that are as fast as any)"
            found.append(Bars(f"{variant}: {title}", tuple(bars), _GROUPS, rounded_time))
        return found

    def __repr__(self) -> str:
        return "\n".join((f"<plan of {self.topology.job.name}>", *self._lines()))

    def _lines(self) -> list[str]:
        problem, given = self.planned.problem, self.given
        processes = "1 process" if problem.processes == 1 else f"{problem.processes} processes"
        network = f"{rounded_time(given['alpha_s'])} per message, {rounded_rate(given['bandwidth'])} ({given['network']})"
        lines = [
            f"{given['layers']}: {given['weights']:,} weights; {network}",
            f"{processes} and a batch of {problem.batch}: grid {self.grid}, {rounded_time(self.step_s)} a step",
        ]
        best = next((row for row in self.groups if row["saturation"]), None)
        if best is not None:
            shape = f"{counted(best['groups'], 'group')} of {best['group_size']}"
            lines.append(f"{shape}: {rounded_time(best['update_s'])} an update; more groups are not faster")
        return lines

    def _repr_html_(self) -> str:
        text = [paragraph(self.topology.job.name, bold=True), *map(paragraph, self._lines())]
        if self.planned.problem.processes > 1:
            seconds = self.planned.problem.link.seconds
            layers = self.planned.price.layers
            rows = [
                (each.stage.name, each.placed.choice, str(each.placed.grid), rounded_time(seconds(each.cost.total)))
                for each in layers
            ]
            text.append(table(("layer", "choice", "grid", "communication"), rows))
        picture = self.plot() if self.planned.problem.processes > 1 or self.groups else ""
        return "".join((*text, picture))


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['groups']} of {row['group_size']}"


def _parts(row: Mapping[str, Any]) -> dict[str, float]:
    """An update's time in the proportions of a group's step, of which there are as many at once as there are groups."""
    compute, exposed, whole = row["compute_s"], row["exposed_s"], row["group_step_s"]
    share = row["update_s"] / whole if whole else 0.0
    return dict(zip(_GROUPS, (share * compute, share * exposed, max(0.0, share * (whole - compute - exposed))), strict=True))
