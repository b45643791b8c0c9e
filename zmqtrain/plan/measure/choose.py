"""Which of several measurements is the best. Pure."""

from __future__ import annotations

from collections.abc import Sequence

#: Measurements that are lower than the best by at most this share count as equal to it: repeated measurements differ by that.
TOLERANCE = 0.03
#: Larger steps are tried until this many in a row were no better.
PATIENCE = 2


def smallest_good(found: Sequence[tuple[int, float]]) -> int:
    """The smallest choice whose throughput equals the best, within the tolerance. ``found``: pairs (choice, throughput)."""
    best = max(rate for _, rate in found)
    return min(choice for choice, rate in found if rate >= best * (1 - TOLERANCE))


def levelled_off(rates: Sequence[float]) -> bool:
    """Whether throughput, in the order of growing choices, has stopped growing."""
    if len(rates) <= PATIENCE:
        return False
    return max(rates[-PATIENCE:]) < max(rates[:-PATIENCE]) * (1 + TOLERANCE)


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found if most == found[-1] else [*found, most]
