"""Chooses the next momentum to try: from a likely one on, as long as its neighbours are better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def next_momentum(momenta: Sequence[float], near: float, tried: Mapping[float, float]) -> float | None:
    """The next momentum: first the one closest to ``near``, then neighbours of the best, on ``near``'s side first; ``None`` if
    both are worse.

    ``tried``: the loss of each so far, infinite if it diverged. After that only smaller ones are worth a trial."""
    choices = sorted(momenta)
    # Of two that are equally close, the lower one is safer.
    first = min(choices, key=lambda each: (round(abs(each - near), 9), each))
    if first not in tried:
        return first
    best = min((each for each in choices if each in tried), key=lambda each: (tried[each], each))
    sound = math.isfinite(tried[best])
    at = choices.index(best)
    for way in (1, -1) if near >= first else (-1, 1):
        if 0 <= at + way < len(choices) and choices[at + way] not in tried and (way < 0 or sound):
            return choices[at + way]
    return None
