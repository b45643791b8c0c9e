"""When a fitted learning rate rises again: a running mean of cosines, over the pieces of a server."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.rate_recovery import MARGIN, WAIT, Alignment, RateRecovery

GROUPS = 4
FIRST = WAIT * GROUPS


def along(cosine: float) -> Alignment:
    return Alignment(6 * cosine, 4.0, 9.0)


def told(recovery: RateRecovery, cosine: float, updates: int) -> list[float]:
    factors = []
    for _ in range(updates):
        recovery.told({0: along(cosine)})
        factors.append(recovery.factor)
    return factors


def test_it_rises_where_gradients_go_on_along_the_path_but_not_at_the_beginning() -> None:
    recovery = RateRecovery([0], GROUPS, 4.0)
    assert told(recovery, 0.5, FIRST) == [1.0] * FIRST
    factors = told(recovery, 0.5, 100)
    assert 1 < factors[0] < 1 + 0.5 / GROUPS
    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(4.0)


@pytest.mark.parametrize("cosine", [0.0, 0.9 * MARGIN, -0.01, -0.9])
def test_it_stays_where_steps_are_large_enough(cosine: float) -> None:
    assert set(told(RateRecovery([0], GROUPS, 4.0), cosine, 300)) == {1.0}


def test_it_falls_faster_than_it_rises_and_no_lower_than_the_fitted_rate() -> None:
    recovery = RateRecovery([0], GROUPS, 1e9)
    rising = told(recovery, 0.2, FIRST + 60)
    falling = told(recovery, -0.2, 200)
    assert rising[-1] > 2
    assert falling[-1] == 1.0
    assert max(b / a for a, b in pairwise(rising)) < max(a / b for a, b in pairwise(falling))


def test_more_groups_take_as_many_rounds() -> None:
    two, eight = RateRecovery([0], 2, 100.0), RateRecovery([0], 8, 100.0)
    assert told(two, 0.1, 2 * 40)[-1] == pytest.approx(told(eight, 0.1, 8 * 40)[-1], rel=0.05)


def test_pieces_count_by_their_gradients_and_paths_together() -> None:
    """One by one or at once; each as it came last."""
    one, both, apart = (RateRecovery(pieces, GROUPS, 4.0) for pieces in ([0], [0, 1], [0, 1]))
    parts = {0: Alignment(-1.0, 1.0, 5.0), 1: Alignment(4.0, 3.0, 4.0)}
    for _ in range(FIRST + 30):
        one.told({0: Alignment(3.0, 4.0, 9.0)})
        both.told(parts)
        for piece, each in parts.items():
            apart.told({piece: each})
    assert one.factor > 1.5
    assert both.factor == pytest.approx(one.factor)
    assert apart.factor == pytest.approx(one.factor, rel=0.05)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_does_not_count(bad: float) -> None:
    recovery, other = RateRecovery([0], GROUPS, 4.0), RateRecovery([0], GROUPS, 4.0)
    for number in range(FIRST + 20):
        recovery.told({0: along(0.3)})
        other.told({0: along(0.3)})
        if number % 3 == 0:
            recovery.told({0: Alignment(bad, bad, 1.0)})
    assert recovery.factor == other.factor > 1


def test_without_a_gradient_or_a_path_there_is_no_angle() -> None:
    recovery = RateRecovery([0], GROUPS, 4.0)
    for _ in range(FIRST + 20):
        recovery.told({0: Alignment(0.0, 0.0, 0.0)})
    recovery.told({})
    assert recovery.factor == 1.0


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    course = [{number % 3: along(math.sin(number / 40))} for number in range(3 * FIRST + 200)]

    def factors(recovery: RateRecovery, part: list[dict[int, Alignment]]) -> list[float]:
        result = []
        for each in part:
            recovery.told(each)
            result.append(recovery.factor)
        return result

    whole = factors(RateRecovery(range(3), GROUPS, 4.0), course)
    assert len(set(whole)) > 50
    for done in (0, 2, 3 * FIRST + 50):
        first, resumed = RateRecovery(range(3), GROUPS, 4.0), RateRecovery(range(3), GROUPS, 4.0)
        factors(first, course[:done])
        resumed.load(first.state())
        assert factors(resumed, course[done:]) == whole[done:]


GOOD: dict[str, Any] = {"last": {"0": [1.0, 2.0, 3.0]}, "cosine": 0.1, "seen": 50.0, "log": 0.5}


def test_a_lower_ceiling_holds_for_what_has_recovered() -> None:
    recovery = RateRecovery([0], GROUPS, 1.25)
    recovery.load(GOOD)
    assert recovery.factor == pytest.approx(1.25)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {**GOOD, "last": [1.0]},
        {**GOOD, "last": {"0": [1.0, 2.0]}},
        {**GOOD, "last": {"0": [1.0, 2.0, "3"]}},
        {**GOOD, "last": {"7": [1.0, 2.0, 3.0]}},
        {**GOOD, "cosine": math.nan},
        {**GOOD, "seen": True},
        {**GOOD, "log": None},
    ],
)
def test_a_checkpoint_of_something_else_is_refused(wrong: Any) -> None:
    recovery = RateRecovery([0], GROUPS, 4.0)
    with pytest.raises(CheckpointError, match="has recovered"):
        recovery.load(wrong)
    assert recovery.factor == 1.0
    recovery.load(GOOD)
