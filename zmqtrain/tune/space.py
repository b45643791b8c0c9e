"""The choices of a search, and its time limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Space:
    """Choices and limits of a search. Times are the world's: virtual in a simulation."""

    update_s: Mapping[int, float]
    """Predicted seconds per update for each possible number of groups: hardware efficiency."""
    saturation: int | None = None
    """g*: the smallest number of groups that is as fast as any. None: the speeds of all numbers of groups are measured first."""
    momenta: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    fine: tuple[float, ...] = (0.1, 0.2)
    """Small momenta that are tried before 0 counts as the best momentum."""
    rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """Learning rates of the first sweep, from low to high."""
    speed: int = 3
    """Steps of each group in which the speed is measured."""
    probe: int = 60
    """Updates of a probe with one group for each worker. Other numbers of groups get as much time."""
    period: int = 2000
    """Updates of training between two searches, at least."""
    cold: int = 200
    """Updates of the first training, with the best setting for an untrained model; 0: none."""
    share: float = 0.1
    """The largest share of all time for the search."""
    limit_s: float = float("inf")
    """Seconds for search and training together."""
    smooth: int = 20
    """Updates over which a loss is smoothed before it is compared with a target."""
    target: float | None = None
    """The loss to reach, if there is one."""
    worse: float = 0.02
    """A loss is worse than another if it is higher by this fraction; smaller differences are a tie."""

    @property
    def groups(self) -> tuple[int, ...]:
        """All numbers of groups, in order."""
        return tuple(sorted(self.update_s))

    def __post_init__(self) -> None:
        if not self.update_s or (self.saturation is not None and self.saturation not in self.update_s):
            raise ValueError(f"g* = {self.saturation} is not one of the numbers of groups: {sorted(self.update_s)}")
        if not self.momenta or not self.rates:
            raise ValueError("a search needs at least one momentum and one learning rate")
        if not 0 < self.share < 1:
            raise ValueError(f"the share of the time for a search must be between 0 and 1, not {self.share:g}")

    def fewer(self, groups: int) -> int | None:
        """The largest number of groups that is at most half of ``groups``; ``None`` if there is none."""
        return max((each for each in self.groups if 2 * each <= groups), default=None)
