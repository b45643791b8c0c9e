"""Settings side by side: who leads, who goes on, and who is asked again."""

from __future__ import annotations

import math

import pytest

from zmqtrain.tune.race import LegEnd, Race, Runner, above, better, pace
from zmqtrain.tune.trial import Outcome, Setting, Trial


def leg(runner: Runner, number: int, updates: int, loss: float, noise: float = 0.01) -> None:
    trial = Trial(number, runner.setting, updates, "probe", "learning rate", "because", runner.number, keeps=True)
    runner.tell(trial, Outcome(updates, 2.0 * updates, 2.3, loss, noise, whole_s=2.0 * updates + 1))


def race_of(*losses: float, momentum: float = 0.9) -> Race:
    race = Race(0.02)
    for number, loss in enumerate(losses):
        leg(race.enter(Setting(1, momentum, 10.0**-number)), number, 15, loss)
    return race


def test_a_runner_remembers_its_way() -> None:
    runner = Runner(Setting(1, 0.9, 0.1))
    assert (runner.updates, runner.seconds, runner.loss, runner.noise, runner.number) == (0, 0.0, math.inf, 0.0, None)
    leg(runner, 3, 10, 2.0, 0.1)
    leg(runner, 5, 20, 1.0)
    assert (runner.updates, runner.seconds, runner.loss, runner.number, runner.spent_s) == (30, 60.0, 1.0, 5, 62.0)
    assert runner.at(5) == runner.at(10) == LegEnd(10, 20.0, 2.0, 0.1)
    assert runner.at(20) == LegEnd(20, 40.0, 1.5, 0.1)
    assert runner.at(31) is None
    leg(runner, 6, 40, math.inf)
    assert runner.diverged
    assert (runner.updates, runner.number) == (30, 5)


def test_the_leader_has_the_lowest_loss_or_learns_faster_where_that_tells_nothing() -> None:
    leader = race_of(1.5, 2.0, 2.3).leader
    assert leader is not None
    assert leader.setting.lr == 1
    leader = race_of(2.30, 2.29, 2.31).leader
    assert leader is not None
    assert leader.setting.lr == 1
    assert race_of(math.inf, math.inf).leader is None
    assert pace(Setting(1, 0.9, 0.1)) == pytest.approx(1)
    assert pace(Setting(1, 1.0, 0.1)) < math.inf


def test_who_cannot_be_told_from_the_lowest_loss_may_lead() -> None:
    race = Race(0.02)
    for number, (lr, loss) in enumerate(((0.1, 1.55), (0.01, 1.37))):
        leg(race.enter(Setting(1, 0.9, lr)), number, 12, loss, 0.3)
    assert race.leader is race.runners[0]


def test_who_is_furthest_ahead_of_the_leader_after_as_many_samples_is_asked_first() -> None:
    race = race_of(2.20, math.inf, 2.19, 2.21, 2.4)
    lead, _, second, third, last = race.runners
    leg(lead, 5, 15, 2.2)
    leg(lead, 6, 30, 2.2)
    leg(third, 7, 15, 2.0)  # 0.2 ahead of the leader after 30
    anew = race.enter(Setting(1, 0.6, 1.0))
    assert race.rivals(lead) == [third, anew, second]  # the first is better already
    assert last.behind  # clearly above
    leg(lead, 9, 30, 3.0)
    assert last in race.rivals(lead)  # which the leader is now
    leg(lead, 10, 30, 2.2)
    last.spent = True
    leg(third, 8, 60, 1.5)
    assert race.rivals(lead) == [third, anew, second]
    assert race.has(Setting(1, 0.9, 0.1))
    assert not race.has(Setting(1, 0.3, 0.1))


@pytest.mark.parametrize(
    ("updates", "loss", "found"), [(100, 1.9, True), (100, 2.0, False), (50, 2.0, True), (51, 2.0, False), (50, 2.1, False)]
)
def test_better_is_clearly_lower_or_as_low_with_half_as_many_samples(updates: int, loss: float, found: bool) -> None:
    assert better(LegEnd(updates, 1.0, loss, 0.01), LegEnd(100, 1.0, 2.0, 0.01)) is found


@pytest.mark.parametrize(("loss", "noise", "found"), [(1.3, 0.1, True), (1.15, 0.1, False), (1.03, 0.0, False)])
def test_above_is_by_both_standard_errors_and_more_than_a_tie(loss: float, noise: float, found: bool) -> None:
    assert above(LegEnd(1, 1.0, loss, noise), LegEnd(1, 1.0, 1.0, noise), 0.05) is found
