"""From a run's losses to what a search is told."""

from __future__ import annotations

import json
import math

import pytest

from zmqtrain.tune.trial import Outcome, Smoothed, reach


def losses(*values: float) -> list[tuple[float, float]]:
    return [(0.5 * (index + 1), value) for index, value in enumerate(values)]


def test_the_last_third_counts() -> None:
    outcome = Outcome.of(losses(9, 8, 7, 6, 5, 4, 3, 2, 1), updates=9, seconds=4.5)
    assert (outcome.first, outcome.loss) == (9, 2)
    assert outcome.noise == pytest.approx(1 / math.sqrt(3))
    assert outcome.update_s == 0.5
    assert not outcome.diverged


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_diverges(bad: float) -> None:
    outcome = Outcome.of(losses(3, 2, bad), updates=3, seconds=1.0)
    assert outcome.diverged
    assert outcome.first == 3
    assert Outcome.of(losses(3, 2, 1), updates=3, seconds=1.0, diverged=True).diverged
    nothing = Outcome.of([], updates=0, seconds=0.0)
    assert nothing.diverged
    assert nothing.update_s == 0


def test_as_json_and_back() -> None:
    for outcome in (
        Outcome.of(losses(3, 2, 1), updates=3, seconds=1.0, staleness=2.5, momentum=0.8, drifted="why"),
        Outcome.of(losses(3, 2, math.nan), updates=3, seconds=1.0),
    ):
        assert Outcome.from_value(json.loads(json.dumps(outcome.to_value()))) == outcome
    empty = Outcome.from_value(Outcome.of([], updates=0, seconds=0.0).to_value())
    assert math.isnan(empty.first)
    with pytest.raises(TypeError):
        Outcome.from_value({"updates": 1, "seconds": 1.0, "first": 1.0, "loss": 1.0, "colour": "red"})


def test_when_a_target_is_reached() -> None:
    falling = [10 - 0.1 * index for index in range(100)]
    index = reach(falling, 5.0)
    assert index is not None
    assert falling[index] < 5.0  # the smoothed one lags behind
    assert reach(falling, 0.0) is None
    assert reach([0.0] * 5, 1.0) is None  # too few to tell
    assert reach([0.0] * 5, 1.0, 20, (1.2, 16)) == 3  # together twenty: 16 * 1.2 / 20 is less than 1
    assert reach([0.0] * 5, 1.0, 20, (1.2, 20)) == 3  # 1.2 * 0.95 ** 4
    assert reach([0.0] * 20, 1.0, 20, (9.0, 20)) == 19  # its own losses are enough, whatever was before
    outcome = Outcome.of(losses(*falling), updates=200, seconds=50.0, target=5.0)
    assert outcome.reached == pytest.approx(0.5 * (index + 1))
    assert outcome.reached_updates == 2 * (index + 1)


def test_short_trials_one_after_another_reach_a_target_no_sooner_than_one_long_one() -> None:
    """Each is shorter than the smoothing, and ends with a few low losses by chance."""
    whole = [2.0 - 0.005 * index - 0.3 * (index % 12 >= 8) for index in range(180)]
    reached = reach(whole, 1.5)
    assert reached is not None
    before = None
    for begin in range(0, 180, 12):
        part = Outcome.of(losses(*whole[begin : begin + 12]), updates=12, seconds=6.0, target=1.5, before=before)
        assert (part.reached is not None) == (begin <= reached < begin + 12)
        if part.reached is not None:
            break
        before = part.smoothed
    assert part.reached_updates == reached - begin + 1


def test_the_smoothed_loss_begins_as_a_mean() -> None:
    smoothed = Smoothed()
    assert [smoothed.add(value) for value in (4.0, 2.0, 3.0)] == [4.0, 3.0, 3.0]
    assert not smoothed.settled
