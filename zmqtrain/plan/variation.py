"""What it costs that times vary: groups wait for their slowest workers, and get in each other's way at what they share. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from zmqtrain.topology.compute import Noise

_EULER = 0.57721566
#: Rounds until the waits are those at the speed that they lead to.
_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Variation:
    """How the times of a worker's steps are distributed, beside their mean."""

    kind: Literal["constant", "normal", "exponential"] = "constant"
    spread: float = 0.0
    """normal: standard deviation, as a share of the mean."""
    straggler_chance: float = 0.0
    straggler_factor: float = 1.0

    @classmethod
    def of_noise(cls, noise: Noise) -> Variation:
        """As modelled devices have it."""
        return cls(noise.kind, noise.spread, noise.straggler_chance, noise.straggler_factor)

    @property
    def varies(self) -> bool:
        """Whether steps are not all alike."""
        return self.kind == "exponential" or (self.kind == "normal" and self.spread > 0) or self.straggler_chance > 0

    def slowest_of(self, workers: int) -> float:
        """The mean of the longest of so many workers' steps, in means of one without stragglers."""
        some = 1 - (1 - self.straggler_chance) ** workers
        if not some:
            return self._longest_of(workers)
        stragglers = self.straggler_chance * workers / some  # in the mean, where there are any
        return (1 - some) * self._longest_of(workers) + some * self.straggler_factor * self._longest_of(stragglers)

    def _longest_of(self, workers: float) -> float:
        """Without stragglers."""
        if self.kind == "exponential":  # the sum of 1/n for so many n
            return math.log(workers) + _EULER + 1 / (2 * workers) - 1 / (12 * workers**2)
        if self.kind == "normal" and workers > 1:
            # Of n draws the largest is, in the mean, about where a share of (n - pi/8) / (n + 1 - pi/4) lies below (Blom).
            below = (workers - math.pi / 8) / (workers + 1 - math.pi / 4)
            return 1 + self.spread * NormalDist().inv_cdf(below)
        return 1.0

    def draw(self, chance: random.Random, workers: int) -> float:
        """The longest of so many workers' steps, once."""
        return max(self._one(chance) for _ in range(workers)) if self.varies else 1.0

    def _one(self, chance: random.Random) -> float:
        factor = 1.0
        if self.kind == "normal":
            factor = max(0.0, chance.normalvariate(1.0, self.spread))
        elif self.kind == "exponential":
            factor = chance.expovariate(1.0)
        return factor * self.straggler_factor if chance.random() < self.straggler_chance else factor


def wait_s(path_s: float, customers: int, shared_s: Sequence[float]) -> float:
    """How much longer a path is, in the mean, where so many are under way that all pass the same stations.

    Whoever comes to a station finds another one there as often as the others keep it busy, and waits for half of that one's time
    (all others are somewhere at random; constant times would arrange themselves). The answer fits the speed that it leads to.
    """
    if customers < 2 or path_s <= 0:
        return 0.0
    least_s = max([path_s, *(customers * each for each in shared_s)])
    low, high = 0.0, sum(shared_s) * customers
    for _ in range(_ROUNDS):  # the wait falls with the length of the round that it is a part of
        middle = (low + high) / 2
        round_s = max(least_s, path_s + middle)
        waits = sum(each * min(1.0, (customers - 1) * each / round_s) / 2 for each in shared_s)
        low, high = (middle, high) if waits > middle else (low, middle)
    return (low + high) / 2
