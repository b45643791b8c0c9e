"""Decides how workers of different speeds divide a step's samples, from the measured speed of each. Pure functions.

A step takes as long as its slowest worker, so parts in proportion to throughput make all workers take equally long. Some of a
worker's time does not depend on its samples, so a first decision changes too little; later decisions start from times measured
with the new parts, and correct that. A change that would gain next to nothing is not made: parts would follow every fluctuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.data.parts import parts_of
from zmqtrain.topology.rounded import rounded_time
from zmqtrain.words import counted

#: The first decision comes after this many steps; the interval then doubles until it is the interval that was asked for.
FIRST_STEPS = 4
#: New parts are used only if they are expected to make a step faster by at least this factor.
WORTH = 1.05
#: A worker's part is at least this share of an even part, so that a worker that was stopped for a while is measured again.
LEAST_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Balance:
    """How many samples each worker takes, and why."""

    parts: tuple[int, ...]
    changed: bool
    gain: float
    """The expected speed-up of a step, as a factor."""
    reason: str


def due(steps: int, every: int) -> bool:
    """Whether parts are decided after ``steps`` trained steps; ``every`` is the longest interval between decisions."""
    if steps < every:
        doublings, rest = divmod(steps, FIRST_STEPS)
        return steps > 0 and rest == 0 and doublings & (doublings - 1) == 0
    return steps % every == 0


def decide(parts: Sequence[int], sample_s: Sequence[float], *, least: int = 1) -> Balance:
    """Decide the parts of the workers of a step.

    Args:
        parts: the current number of samples of each worker.
        sample_s: the seconds that one sample took on each worker, on average; 0 if a worker has no measurement yet. Parts then
            stay.
        least: the smallest number of samples that a worker may have.
    """
    current = tuple(parts)
    if min(sample_s) <= 0:
        return Balance(current, False, 1.0, f"worker {list(sample_s).index(min(sample_s))} has no measurement yet")
    floor = max(least, int(sum(parts) / len(parts) * LEAST_SHARE))
    better = parts_of(sum(parts), [1 / seconds for seconds in sample_s], least=floor)
    before = [part * seconds for part, seconds in zip(current, sample_s, strict=True)]
    after = [part * seconds for part, seconds in zip(better, sample_s, strict=True)]
    gain = max(before) / max(after)
    slowest = before.index(max(before))
    longest, shortest = rounded_time(max(before)), rounded_time(min(before))
    told = f"worker {slowest} takes {longest} for its {counted(current[slowest], 'sample')}, the fastest worker {shortest}"
    if gain < WORTH:
        return Balance(current, False, gain, f"{told}; other parts would make steps only {gain:.2f} times as fast")
    return Balance(better, True, gain, f"{told}; the new parts should make steps {gain:.2f} times as fast")
