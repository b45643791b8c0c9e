"""Which of several measurements is the best. Pure."""

from __future__ import annotations

from collections.abc import Sequence

#: So much less than the best is as good as it: measurements of the same differ by that.
TOLERANCE = 0.03
#: Larger steps are tried until so many in a row were no better.
PATIENCE = 2


def smallest_good(found: Sequence[tuple[int, float]]) -> int:
    """The smallest choice whose throughput is, but for the tolerance, the best of all. ``found``: (choice, throughput) pairs."""
    best = max(rate for _, rate in found)
    return min(choice for choice, rate in found if rate >= best * (1 - TOLERANCE))


def levelled_off(rates: Sequence[float]) -> bool:
    """Whether throughput, in the order of growing choices, grows no more."""
    if len(rates) <= PATIENCE:
        return False
    return max(rates[-PATIENCE:]) < max(rates[:-PATIENCE]) * (1 + TOLERANCE)


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found if most == found[-1] else [*found, most]
