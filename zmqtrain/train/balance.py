"""Decides how workers of different speeds divide a step's samples, from how fast each was. Pure.

The slowest worker is the step's: with parts in proportion to throughput all take equally long. Some of a worker's time does not
depend on its samples, so a first decision goes less far than it should; decisions from times with the new parts then go on from
there. What would bring next to nothing is left as it is: parts that follow every fluctuation would be no better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.data.parts import parts_of

#: The first decisions come after so many steps, twice as many, and so on, until they come as often as is asked for.
FIRST_STEPS = 4
#: New parts must make the step so many times as fast, as far as that can be told.
WORTH = 1.05
#: A worker's part is at least so much of an even one: whoever was stopped for a while is not slow for ever.
LEAST_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Decision:
    """Who takes how many samples, and why."""

    parts: tuple[int, ...]
    changed: bool
    gain: float
    """How many times as fast the step is to be."""
    reason: str


def due(steps: int, every: int) -> bool:
    """Whether parts are decided when so many steps have been trained."""
    if steps < every:
        doublings, rest = divmod(steps, FIRST_STEPS)
        return steps > 0 and rest == 0 and doublings & (doublings - 1) == 0
    return steps % every == 0


def decide(parts: Sequence[int], sample_s: Sequence[float], *, least: int = 1) -> Decision:
    """``parts``: as they are; ``sample_s``: the seconds that each worker's samples took, one in the mean; ``least``: samples that
    each must have. Whoever has no measurement (0) keeps what it has, and so do all."""
    current = tuple(parts)
    if min(sample_s) <= 0:
        return Decision(current, False, 1.0, f"worker {list(sample_s).index(min(sample_s))} of these has measured nothing yet")
    floor = max(least, int(sum(parts) / len(parts) * LEAST_SHARE))
    better = parts_of(sum(parts), [1 / seconds for seconds in sample_s], least=floor)
    before = [part * seconds for part, seconds in zip(current, sample_s, strict=True)]
    after = [part * seconds for part, seconds in zip(better, sample_s, strict=True)]
    gain = max(before) / max(after)
    slowest = before.index(max(before))
    told = (
        f"worker {slowest} of these takes {max(before):.4g} s for its {current[slowest]} samples, the fastest {min(before):.4g} s"
    )
    if gain < WORTH:
        return Decision(current, False, gain, f"{told}: other parts would make steps {gain:.2f} times as fast")
    return Decision(better, True, gain, f"{told}: these parts are to make steps {gain:.2f} times as fast")
