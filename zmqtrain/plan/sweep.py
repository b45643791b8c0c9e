"""How a model scales: more processes for one batch, for a batch that grows with them, and for fewer samples than processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zmqtrain.errors import UsageError
from zmqtrain.plan.planner import Planned, plan
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.rules import domain_for_images, every_grid, pure

Scaling = Literal["strong", "weak", "beyond"]
#: How far beyond the batch size a sweep goes, in processes per sample.
BEYOND = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Point:
    """One number of processes and one batch."""

    scaling: Scaling
    processes: int
    batch: int
    planned: Planned | None
    obstacle: str
    """Why there is no plan."""
    batch_s: float | None
    """A step with pure batch parallelism; none if there are more processes than samples."""
    model_s: float | None
    """A step with pure model parallelism; none if that is impossible."""
    domain_s: float | None
    """A step with all images in strips and all other layers model-parallel, on the best grid; none if there is none."""

    @property
    def summary(self) -> str:
        """How many layers are placed in which way."""
        if self.planned is None:
            return self.obstacle
        return ", ".join(f"{count} {how}" for how, count in Counter(map(str, self.planned.placed)).items())


def sweep(make: Callable[[int, int], Problem], processes: Sequence[int], batches: Sequence[int], *, part: int) -> Iterator[Point]:
    """All points. ``make(processes, batch)`` returns the problem; ``part``: samples per process in weak scaling.

    Strong: each batch on all numbers of processes. Weak: ``part`` samples per process. Beyond: as many samples as the largest
    number of processes, and more processes still, by `BEYOND`.
    """
    for batch in batches:
        for size in processes:
            yield _point("strong", make, size, batch)
    for size in processes:
        yield _point("weak", make, size, part * size)
    most = max(processes)
    for factor in BEYOND:
        yield _point("beyond", make, most * factor, most)


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself."""
    found = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return found if found[-1] == most else [*found, most]


def _point(scaling: Scaling, make: Callable[[int, int], Problem], processes: int, batch: int) -> Point:
    problem = make(processes, batch)
    planned, obstacle = None, ""
    try:
        planned = plan(problem)
    except UsageError as error:  # other points may have a plan
        obstacle = str(error)
    seconds = [None if each.obstacle else each.price.step_s for each in pure(problem)]
    strips = [each for each in every_grid(problem, "domain", domain_for_images) if each.obstacle is None and each.grid.rows > 1]
    domain_s = min((each.price.step_s for each in strips), default=None)
    return Point(scaling, processes, batch, planned, obstacle, seconds[0], seconds[1], domain_s)
