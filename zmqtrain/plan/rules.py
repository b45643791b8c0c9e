"""Plans by simple rules, for comparison with the planner: pure ones, one grid for all layers, one grid for some layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import PlanPrice, price
from zmqtrain.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class Ruled:
    """A plan made by a rule."""

    name: str
    grid: Grid
    placed: tuple[Placed, ...]
    price: PlanPrice
    obstacle: str | None
    """Why it cannot be carried out; it has a price anyway."""


def same_grid(problem: Problem, grid: Grid) -> list[Placed]:
    """All layers model-parallel over the rows (Eq. 8); those that cannot be divided are computed whole."""
    return [_model_or_whole(problem, index, grid) for index in range(len(problem.layers))]


def grid_for_connected(problem: Problem, grid: Grid) -> list[Placed]:
    """Layers without images on the grid, all others pure batch."""
    batch = Placed.of("batch", grid)
    return [batch if stage.head.image else _model_or_whole(problem, index, grid) for index, stage in enumerate(problem.layers)]


def domain_for_images(problem: Problem, grid: Grid) -> list[Placed]:
    """Images in strips over the rows, all other layers model-parallel over them."""
    strips = Placed.of("domain", grid)
    return [strips if stage.head.image else _model_or_whole(problem, index, grid) for index, stage in enumerate(problem.layers)]


def ruled(problem: Problem, name: str, grid: Grid, placed: Sequence[Placed]) -> Ruled:
    """A plan with its price, and the first obstacle to it."""
    obstacle = None
    for stage, how in zip(problem.layers, placed, strict=True):
        reason = problem.obstacle(stage, how)
        if reason is not None:
            obstacle = f"{how} of {stage.name}: {reason.text}"
            break
    return Ruled(name, grid, tuple(placed), price(problem, placed), obstacle)


def every_grid(problem: Problem, name: str, rule: Callable[[Problem, Grid], list[Placed]]) -> list[Ruled]:
    """A rule on all grids."""
    return [ruled(problem, name, grid, rule(problem, grid)) for grid in problem.grids()]


def best(plans: Sequence[Ruled]) -> Ruled:
    """The shortest step among those that can be carried out; among all, if none can."""
    return min([each for each in plans if each.obstacle is None] or plans, key=lambda each: each.price.step_s)


def pure(problem: Problem) -> tuple[Ruled, Ruled]:
    """Pure batch and pure model."""
    one_row, one_column = Grid(1, problem.processes), Grid(problem.processes, 1)
    return (
        ruled(problem, "pure batch", one_row, same_grid(problem, one_row)),
        ruled(problem, "pure model", one_column, same_grid(problem, one_column)),
    )


def _model_or_whole(problem: Problem, index: int, grid: Grid) -> Placed:
    model = Placed.of("model", grid)
    reason = problem.obstacle(problem.layers[index], model)
    return Placed.of("whole", grid) if reason is not None and reason.always and model.choice == "model" else model
