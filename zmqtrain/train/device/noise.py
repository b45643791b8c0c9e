"""How a modelled device's times vary from step to step. Pure: the same seed, worker and step give the same factor."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "normal", "exponential"]

#: The smallest factor of a normal distribution, so that no step takes no time or negative time. With a standard deviation up to 0.3
#: one draw in a thousand is limited, and the mean stays within 0.0002 of 1; with 0.5 it is 1.006.
SMALLEST = 0.05


@dataclass(frozen=True, slots=True)
class Noise:
    """Draws the factor on the times of a step. The distributions have mean 1; stragglers come on top."""

    kind: Kind = "constant"
    spread: float = 0.1
    """The standard deviation of a normal distribution. (That of the exponential distribution is 1.)"""
    straggler_chance: float = 0.0
    straggler_factor: float = 3.0

    def factor(self, seed: int, rank: int, step: int) -> float:
        """The factor for a worker's step. Steps and workers are independent of each other."""
        if self.kind == "constant" and not self.straggler_chance:
            return 1.0
        chance = random.Random(f"compute/{seed}/{rank}/{step}")
        straggles = chance.random() < self.straggler_chance  # drawn first, so that the same steps straggle with any distribution
        factor = 1.0
        if self.kind == "normal":
            factor = max(SMALLEST, chance.normalvariate(1.0, self.spread))
        elif self.kind == "exponential":
            factor = chance.expovariate(1.0)
        return factor * self.straggler_factor if straggles else factor
