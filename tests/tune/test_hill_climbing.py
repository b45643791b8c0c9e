"""Which momentum is tried next."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from zmqtrain.tune.hill_climbing import next_momentum

MOMENTA = (0.9, 0.0, 0.6, 0.3)


def order(near: float, loss: Callable[[float], float]) -> list[float]:
    tried: dict[float, float] = {}
    while (momentum := next_momentum(MOMENTA, near, tried)) is not None:
        assert momentum not in tried
        tried[momentum] = loss(momentum)
    return list(tried)


@pytest.mark.parametrize(
    ("near", "best", "expected"),
    [
        (0.9, 0.9, [0.9, 0.6]),  # one group
        (0.4, 0.3, [0.3, 0.6, 0.0]),  # two: its side first, then the other
        (0.4, 0.9, [0.3, 0.6, 0.9]),
        (0.9 - 0.75, 0.0, [0.0, 0.3]),  # as near to both: the lower one
        (0.025, 0.6, [0.0, 0.3, 0.6, 0.9]),
        (0.9, 0.0, [0.9, 0.6, 0.3, 0.0]),
    ],
)
def test_neighbours_as_long_as_they_are_better(near: float, best: float, expected: list[float]) -> None:
    assert order(near, lambda momentum: abs(momentum - best)) == expected


def test_where_it_diverges_only_smaller_ones_are_tried() -> None:
    assert order(0.7, lambda momentum: math.inf) == [0.6, 0.3, 0.0]
    assert order(0.7, lambda momentum: math.inf if momentum > 0.2 else 1.0) == [0.6, 0.3, 0.0]
    assert order(0.0, lambda momentum: math.inf) == [0.0]
    assert next_momentum((0.5,), 0.9, {0.5: 1.0}) is None
