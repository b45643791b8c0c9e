"""How fast gradients may grow: a running mean of norms, over the pieces of a server."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.norm_limit import LIMIT, MEMORY, NormLimit


def test_what_grows_slowly_is_left_alone() -> None:
    limit = NormLimit([0])
    assert [limit.factor({0: norm}) for norm in (5.0, 5.9, 3.0, 0.0, 4.0, 5.0)] == [1.0] * 6


def test_what_is_too_large_counts_as_it_was_applied() -> None:
    limit = NormLimit([0])
    assert limit.factor({0: 2.0}) == 1.0
    assert limit.factor({0: 4.0}) == pytest.approx(LIMIT * 2 / 4)
    mean = (MEMORY * 2 + LIMIT * 2) / (MEMORY + 1)
    assert limit.factor({0: 4.0}) == pytest.approx(LIMIT * mean / 4)


def test_outliers_hardly_move_it() -> None:
    limit = NormLimit([0])
    for _ in range(100):
        limit.factor({0: 1.0})
    assert [limit.factor({0: 1e6}) * 1e6 for _ in range(3)] == pytest.approx([1.2, 1.208, 1.215], abs=0.002)


def test_the_norm_is_that_of_all_pieces_as_they_came_last() -> None:
    """And nothing is limited before all of them have come."""
    limit = NormLimit([0, 1])
    assert limit.factor({0: 3.0}) == 1.0
    assert limit.factor({1: 4.0}) == 1.0
    assert limit.factor({0: 3.5}) == 1.0
    assert limit.factor({1: 40.0}) == pytest.approx(LIMIT * 5 / math.hypot(3.5, 40), rel=0.05)


def test_pieces_that_are_applied_together_have_one_factor_and_count_as_much() -> None:
    one, two = NormLimit([0]), NormLimit([0, 1])
    for norm in (1.0, 3.0, 2.0, 5.0):
        assert two.factor({0: 0.6 * norm, 1: 0.8 * norm}) == pytest.approx(one.factor({0: norm}))


@pytest.mark.parametrize(("first", "updates"), [(0.1, 120), (1e-3, 180), (1e-9, 310)])
def test_a_gradient_that_begins_near_zero_is_not_held_back_for_long(first: float, updates: int) -> None:
    """As where the last layer begins with weights of 0. By the mean of what was applied alone 1e-9 would take 3,000 updates."""
    limit = NormLimit([0])
    assert limit.factor({0: 0.0}) == 1.0
    assert limit.factor({0: first}) == 1.0
    factors = [limit.factor({0: 1.0}) for _ in range(updates)]
    assert factors == pytest.approx(sorted(factors))
    assert (factors[0], factors[-1]) == (pytest.approx(LIMIT * first), pytest.approx(1.0))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_does_not_count(bad: float) -> None:
    limit, other = NormLimit([0, 1]), NormLimit([0, 1])
    for each in (limit, other):
        each.factor({0: 1.0, 1: 1.0})
    assert limit.factor({0: bad}) == 1.0
    assert limit.factor({0: 9.0, 1: 1.0}) == other.factor({0: 9.0, 1: 1.0}) < 1


def test_norms_whose_sum_is_too_large_are_left_alone() -> None:
    limit = NormLimit([0, 1])
    limit.factor({0: 1.0, 1: 1.0})
    assert limit.factor({0: 1.5e308, 1: 1.5e308}) == 1.0


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    norms = [{number % 3: 1 + (7 * number % 11) / 5} for number in range(40)]
    whole = NormLimit(range(3))
    factors = [whole.factor(each) for each in norms]
    for done in (0, 2, 17):
        first, resumed = NormLimit(range(3)), NormLimit(range(3))
        for each in norms[:done]:
            first.factor(each)
        resumed.load(first.state())
        assert [resumed.factor(each) for each in norms[done:]] == factors[done:]


GOOD: dict[str, Any] = {"norms": {"0": 1.0}, "applied": 1.0, "came": 1.0, "weight": 0.5}


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {**GOOD, "norms": [1.0]},
        {**GOOD, "norms": {"x": 1.0}},
        {**GOOD, "norms": {"-1": 1.0}},
        {**GOOD, "norms": {"0": "1"}},
        {**GOOD, "norms": {"0": -1.0}},
        {**GOOD, "norms": {"7": 1.0}},
        {**GOOD, "applied": math.nan},
        {**GOOD, "came": True},
        {**GOOD, "weight": math.inf},
        {**GOOD, "weight": None},
    ],
)
def test_a_checkpoint_of_something_else_is_refused(wrong: Any) -> None:
    limit = NormLimit([0])
    with pytest.raises(CheckpointError, match="norms of gradients"):
        limit.load(wrong)
    limit.load(GOOD)
