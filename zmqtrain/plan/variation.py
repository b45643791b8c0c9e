"""The cost of varying times: groups wait for their slowest workers, and delay each other at shared resources. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from zmqtrain.topology.compute import Noise

_EULER = 0.57721566
#: The number of iterations until the waits agree with the speed that results from them.
_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Variation:
    """How the times of a worker's steps are distributed around their mean."""

    kind: Literal["constant", "normal", "exponential"] = "constant"
    spread: float = 0.0
    """The standard deviation of a normal distribution, as a share of the mean."""
    straggler_chance: float = 0.0
    straggler_factor: float = 1.0

    @classmethod
    def of_noise(cls, noise: Noise) -> Variation:
        """The distribution of a modelled device's noise."""
        return cls(noise.kind, noise.spread, noise.straggler_chance, noise.straggler_factor)

    @property
    def varies(self) -> bool:
        """Whether step times differ at all."""
        return self.kind == "exponential" or (self.kind == "normal" and self.spread > 0) or self.straggler_chance > 0

    def slowest_of(self, workers: int) -> float:
        """The mean of the longest of ``workers`` workers' steps, relative to the mean of a step without stragglers."""
        some = 1 - (1 - self.straggler_chance) ** workers
        if not some:
            return self._longest_of(workers)
        stragglers = self.straggler_chance * workers / some  # the mean number, if there are any
        return (1 - some) * self._longest_of(workers) + some * self.straggler_factor * self._longest_of(stragglers)

    def _longest_of(self, workers: float) -> float:
        """The same without stragglers."""
        if self.kind == "exponential":  # the sum of 1/n up to the number of workers
            return math.log(workers) + _EULER + 1 / (2 * workers) - 1 / (12 * workers**2)
        if self.kind == "normal" and workers > 1:
            # The largest of n draws is, on average, about where a share of (n - pi/8) / (n + 1 - pi/4) lies below (Blom).
            below = (workers - math.pi / 8) / (workers + 1 - math.pi / 4)
            return 1 + self.spread * NormalDist().inv_cdf(below)
        return 1.0

    def draw(self, chance: random.Random, workers: int) -> float:
        """Draw the longest of ``workers`` workers' steps once."""
        return max(self._one(chance) for _ in range(workers)) if self.varies else 1.0

    def _one(self, chance: random.Random) -> float:
        factor = 1.0
        if self.kind == "normal":
            factor = max(0.0, chance.normalvariate(1.0, self.spread))
        elif self.kind == "exponential":
            factor = chance.expovariate(1.0)
        return factor * self.straggler_factor if chance.random() < self.straggler_chance else factor


def wait_s(path_s: float, customers: int, shared_s: Sequence[float]) -> float:
    """How much longer a path is, on average, if ``customers`` batches are in progress that all pass the same stations.

    A batch that reaches a station finds another one there as often as the others keep it busy, and waits for half of that one's
    time (assuming that all others are at random places; constant times would arrange themselves). The result is consistent with the
    speed that follows from it.
    """
    if customers < 2 or path_s <= 0:
        return 0.0
    least_s = max([path_s, *(customers * each for each in shared_s)])
    low, high = 0.0, sum(shared_s) * customers
    for _ in range(_ROUNDS):  # the wait decreases with the length of the round that it is a part of
        middle = (low + high) / 2
        round_s = max(least_s, path_s + middle)
        waits = sum(each * min(1.0, (customers - 1) * each / round_s) / 2 for each in shared_s)
        low, high = (middle, high) if waits > middle else (low, middle)
    return (low + high) / 2
