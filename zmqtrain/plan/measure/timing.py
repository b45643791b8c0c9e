"""Real time, and the statistics of several measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Times:
    """Several measurements of the same thing."""

    median_s: float
    spread_s: float
    """Half the interquartile range."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        low, median, high = np.percentile(np.asarray(seconds, np.float64), (25, 50, 75))
        return cls(float(median), float(high - low) / 2)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to measure one thing."""

    seconds: float = 1.0
    least: int = 5
    """The smallest number of measurements, however long they take."""
    most: int = 50
    warm_up: int = 2


def clock_of(device: torch.device) -> Clock:
    """A clock in seconds that waits for all work begun on the device."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized


def repeat(run: Callable[[], None], clock: Clock, patience: Patience) -> list[float]:
    """Call ``run`` several times. Returns the seconds of each call."""
    for _ in range(patience.warm_up):
        run()
    found: list[float] = []
    end = clock() + patience.seconds
    while len(found) < patience.least or (len(found) < patience.most and clock() < end):
        start = clock()
        run()
        found.append(clock() - start)
    return found
