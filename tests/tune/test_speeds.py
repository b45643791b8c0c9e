"""What follows from the speeds that were measured: how long a job takes, and whether it is worth a search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zmqtrain.tune.space import Space
from zmqtrain.tune.speeds import Speeds
from zmqtrain.tune.trial import Done, Outcome

#: What the planner thinks; everything takes ten times as long.
SPACE = Space({1: 0.4, 2: 0.2, 4: 0.1}, rates=(0.01, 0.1), share=0.1)
UPDATE_S = {1: 4.0, 2: 2.0, 4: 1.5}
RUN_S = 8.0


def measured(speeds: Speeds) -> tuple[Speeds, Done]:
    while not isinstance(trial := speeds.next(), Done):
        seconds = trial.updates * UPDATE_S[trial.setting.groups]
        speeds.result(trial, Outcome(trial.updates, seconds, 2.3, 2.3, whole_s=seconds + RUN_S))
    return speeds, trial


def test_a_long_job_is_worth_a_search() -> None:
    speeds, done = measured(Speeds(SPACE, updates=10_000))
    assert speeds.too_short is None
    assert speeds.measured == speeds.known == UPDATE_S
    assert speeds.job_s() == 15_000
    assert [trial.updates for trial, _ in speeds.trials] == [3, 6, 12]
    assert "the time of an update is known" in done.reason


def test_a_short_one_is_not_and_the_rest_of_the_speeds_is_as_predicted() -> None:
    speeds, done = measured(Speeds(SPACE, updates=100))
    assert len(speeds.trials) == 1
    assert speeds.known == pytest.approx({1: 4.0, 2: 2.0, 4: 1.0})
    assert done.reason == speeds.too_short
    assert done.reason == (
        "the job takes about 100 s, so the search may take 11 s ([tune] share), but it needs 5 more runs of 20 s each: no search"
    )


def test_where_nobody_knows_how_long_a_job_takes_the_limit_counts() -> None:
    assert measured(Speeds(replace(SPACE, limit_s=3600.0)))[0].too_short is None
    assert "the job takes about 90 s" in str(measured(Speeds(replace(SPACE, limit_s=100.0)))[0].too_short)


def test_a_job_may_turn_out_to_be_too_short_on_the_way() -> None:
    """Its first run has said that it takes long enough, but more groups are much faster than was thought."""
    speeds, _ = measured(Speeds(replace(SPACE, update_s={1: 0.4, 2: 0.4, 4: 0.4}), updates=300))
    assert (len(speeds.trials), speeds.too_short is None) == (2, False)


def test_they_are_resumed() -> None:
    speeds, _ = measured(Speeds(SPACE, updates=100))
    again = Speeds(SPACE, updates=100).replay(speeds.to_value())
    assert (again.too_short, again.known) == (speeds.too_short, speeds.known)
