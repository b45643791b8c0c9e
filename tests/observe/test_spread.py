"""Quantiles in bounded memory: exact for few values, and within the stated precision for many."""

from __future__ import annotations

import random
import statistics

import pytest

from zmqtrain.observe.spread import LINE_PRECISION, PRECISION, Buckets, Spread


def test_few_values_are_exact() -> None:
    spread = Spread()
    assert spread.median() is None
    assert spread.quantile(0.9) is None
    for value in (3.0, 1.0, 2.0, 4.0):
        spread.add(value)
    assert (spread.median(), spread.quantile(0.9), spread.quantile(0.0)) == (2.5, 4.0, 1.0)


def test_many_values_are_right_within_the_precision_and_take_little_memory() -> None:
    draw = random.Random(1)
    values = [draw.lognormvariate(-4, 1) for _ in range(20_000)]
    spread = Spread(most_exact=1000)
    for value in values:
        spread.add(value)
    ordered = sorted(values)
    assert spread.median() == pytest.approx(statistics.median(ordered), rel=PRECISION)
    for share in (0.001, 0.1, 0.9, 0.999, 1.0):
        assert spread.quantile(share) == pytest.approx(ordered[round(share * len(ordered)) - 1], rel=PRECISION)
    assert spread._exact is None
    assert len(spread._buckets.counts) < 5000


def test_zeros_stay_zeros() -> None:
    spread = Spread(most_exact=2)
    for _ in range(5):
        spread.add(0.0)
    assert (spread.median(), spread.quantile(0.9)) == (0.0, 0.0)


def test_values_may_come_with_their_number() -> None:
    spread = Spread(most_exact=10)
    spread.add(1.0, 3)
    spread.add(5.0, 4)
    assert (spread.count, spread.median()) == (7, 5.0)
    spread.add(9.0, 100)
    assert spread.median() == pytest.approx(9.0, rel=PRECISION)


@pytest.mark.parametrize("value", [1e-9, 1e-6, 0.3333, 1.0, 12.5, 1e5])
def test_a_buckets_value_stands_for_what_it_holds(value: float) -> None:
    buckets = Buckets(LINE_PRECISION)
    buckets.add(value)
    (bucket,) = buckets.counts
    assert buckets.value(bucket) == pytest.approx(value, rel=LINE_PRECISION * (1 + 1e-9))
