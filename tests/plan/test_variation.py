"""What varying times cost: the slowest of several, and waits at what is shared."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from zmqtrain.plan.variation import Variation, wait_s


@pytest.mark.parametrize(
    "varies",
    [
        Variation("normal", 0.1),
        Variation("exponential"),
        Variation("normal", 0.05, 0.1, 3.0),
        Variation(straggler_chance=0.2, straggler_factor=2),
    ],
    ids=["normal", "exponential", "stragglers", "only stragglers"],
)
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_mean_of_the_slowest_is_that_of_many_draws(varies: Variation, workers: int) -> None:
    chance = random.Random(f"{varies}/{workers}")
    drawn = fmean(varies.draw(chance, workers) for _ in range(20_000))
    assert varies.slowest_of(workers) == pytest.approx(drawn, rel=0.03)
    assert varies.varies


def test_constant_times_do_not_vary() -> None:
    assert not Variation("normal", 0.0).varies
    assert Variation().slowest_of(100) == Variation().draw(random.Random(1), 100) == 1.0


def test_waits_grow_with_those_who_are_under_way_and_end_where_the_station_is_full() -> None:
    waits = [wait_s(10.0, customers, [1.0]) for customers in (1, 2, 4, 8)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[1] == pytest.approx(0.05, rel=0.02)  # one other, there for a tenth of the time, half of its stay left
    assert wait_s(10.0, 100, [1.0]) <= 0.5
    assert wait_s(0.0, 5, [1.0]) == 0.0
