"""Plans as bars, like the paper's figures 6 to 10: one grid for all layers, one for the fully connected layers only, and the
plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zmqtrain.charts import Bar, Bars
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.planner import Planned
from zmqtrain.plan.price import PlanPrice
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.rules import every_grid, grid_for_connected, same_grid
from zmqtrain.topology.rounded import rounded_time

#: The most bars of a rule. If there are more grids, those that can be carried out come first.
MOST_BARS = 32
#: Parts of a step from the bottom up, with their colours (of Okabe and Ito, for colour-blind readers).
COLOURS: Mapping[str, str] = {
    "compute": "#bbbbbb",
    "all-gather": "#0072b2",
    "dX": "#56b4e9",
    "dW": "#d55e00",
    "halo": "#009e73",
    "redistribute": "#f0e442",
    "statistics": "#cc79a7",
}


def panels(planned: Sequence[Planned]) -> list[Bars]:
    """Two panels for each plan: each of the two rules beside the plan. Without overlap."""
    found = []
    for each in planned:
        rules: list[tuple[str, Callable[[Problem, Grid], list[Placed]]]] = [("one grid for all layers", same_grid)]
        if any(stage.head.image for stage in each.problem.layers):
            rules.append(("images by batch, all other layers on the grid", grid_for_connected))
        for title, rule in rules:
            found.append(_panel(each, title, rule))
    return found


def _panel(planned: Planned, title: str, rule: Callable[[Problem, Grid], list[Placed]]) -> Bars:
    problem = planned.problem
    plans = [each for each in every_grid(problem, title, rule) if each.obstacle is None][:MOST_BARS]
    least = min((each.price.without_overlap_s for each in plans), default=0.0)
    bars = [Bar(str(each.grid), _segments(problem, each.price), each.price.without_overlap_s == least) for each in plans]
    bars.append(Bar("planned", _segments(problem, planned.price)))
    return Bars(f"{problem.processes} processes, batch {problem.batch}: {title}", tuple(bars), COLOURS, rounded_time)


def _segments(problem: Problem, price: PlanPrice) -> dict[str, float]:
    cost, seconds = price.cost.terms(), problem.link.seconds
    return {
        "compute": price.compute_s,
        "all-gather": seconds(cost["all_gather"]),
        "dX": seconds(cost["dx"]),
        "dW": seconds(cost["dw"]),
        "halo": seconds(cost["halo"]),
        "redistribute": seconds(cost["redistribute"]),
        "statistics": seconds(cost["statistics"]),
    }
