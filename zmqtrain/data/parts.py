"""Divides a whole number into parts, as close to given weights as whole parts can be. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def parts_of(count: int, weights: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """Divide ``count`` into one part per weight, each at least ``least``: the same on every machine.

    Each part is its exact share rounded down; the rest goes to the parts that lost most by rounding, the first of equals first.
    Raises `ValueError` if ``count`` is too small, or the weights are invalid: negative, or all zero.
    """
    if count < least * len(weights):
        raise ValueError(f"{count} cannot be divided into {len(weights)} parts of at least {least}")
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"{list(weights)} are not valid weights: none may be negative, and at least one must not be 0")
    # Parts whose share is too small get the least; the others share the rest, which may make another one's too small.
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
    """First and last (exclusive) of the part number ``place``."""
    start = sum(parts[:place])
    return start, start + parts[place]
