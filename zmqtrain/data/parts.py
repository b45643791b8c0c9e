"""A whole number in parts, as near to given weights as whole parts can be. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def parts_of(count: int, weights: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """``count`` in as many parts as there are weights, each at least ``least``: the same on every machine.

    Each part is its share rounded down, and what is left goes to those that lost most by that, the first of equal ones first.
    Raises `ValueError` where there is not enough for all, or the weights are none: negative, or all zero.
    """
    if count < least * len(weights):
        raise ValueError(f"{count} cannot be {len(weights)} parts of at least {least}")
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"{list(weights)} are no weights: none may be negative, and one must not be 0")
    # Those whose share is too small get the least; the others share the rest, which may make another's too small.
    small: set[int] = set()
    while True:
        rest = [place for place in range(len(weights)) if place not in small]
        left = count - least * len(small)
        total = sum(weights[place] for place in rest)
        shares = {place: left * weights[place] / total for place in rest}
        found = {place for place in rest if shares[place] < least}
        if not found:
            break
        small |= found
    parts = [least if place in small else int(shares[place]) for place in range(len(weights))]
    order = sorted(rest, key=lambda place: (int(shares[place]) - shares[place], place))
    for place in order[: count - sum(parts)]:
        parts[place] += 1
    return tuple(parts)


def bounds_of(parts: Sequence[int], place: int) -> tuple[int, int]:
    """Start and stop of one of the parts."""
    start = sum(parts[:place])
    return start, start + parts[place]
