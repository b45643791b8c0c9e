"""Monitoring a trial: losses become an outcome, and reasons to stop it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from zmqtrain.tune.drift import LEAST, Drift
from zmqtrain.tune.monitor import PATIENCE, TrialMonitor
from zmqtrain.tune.trial import First, Outcome, Setting, Trial


def trial(kind: Any = "probe", updates: int = 10, groups: int = 2, above: float | None = None) -> Trial:
    return Trial(0, Setting(groups, 0.3, 0.01), updates, kind, "grid", "because", None, above)


def step(time: float, loss: float | None, staleness: float | None = None, seconds: float = 0.5) -> dict[str, Any]:
    """The event of a step that has this number and ended then, so that a worker's steps are a second apart."""
    return {"kind": "step", "time": time, "step": int(time), "values": {"loss": loss, "seconds": seconds, "staleness": staleness}}


def test_a_probe_is_stopped_when_all_groups_together_have_made_its_updates() -> None:
    """Two groups of two. A worker's events come in batches, some of them late."""
    monitor = TrialMonitor(trial(updates=10), group_size=2)
    for rank in (0, 1, 2):
        for number in range(8):
            monitor.observe(step(100.0 + number, 5.0 + rank - 0.1 * number, 1.0), rank)
    assert monitor.updates == 8  # nobody knows what the second group has done as long as one of its workers is silent
    assert monitor.stop is None
    for number in range(8):
        monitor.observe(step(100.0 + number, 8.0 - 0.1 * number, 3.0), 3)
    assert monitor.stop == "the probe has made its updates"
    outcome = monitor.outcome(whole_s=9.0)
    assert outcome.updates == 10  # the first five of either group; it was stopped late
    assert outcome.seconds == 4.5  # from the begin of the first step
    assert outcome.spent_s == 9.0
    assert outcome.loss == pytest.approx((7.2 + 5.1 + 7.1) / 3)
    assert outcome.staleness == pytest.approx(1.5)
    assert not outcome.diverged


def test_time_after_the_target_does_not_count() -> None:
    monitor = TrialMonitor(trial("train", updates=1000), 1, target=1.0)
    for number in range(60):
        monitor.observe(step(float(number), 3.0 - 0.1 * min(number, 30)))
    outcome = monitor.outcome(whole_s=70.0)
    assert outcome.reached is not None
    assert outcome.spent_s == pytest.approx(70.0 - (outcome.seconds - outcome.reached))


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_loss_that_is_none_ends_it_at_once(loss: float | None) -> None:
    monitor = TrialMonitor(trial(), 1)
    monitor.observe(step(1.0, loss))
    assert "diverges" in str(monitor.stop)
    assert monitor.outcome().diverged


def test_a_loss_far_above_its_begin_ends_it_but_one_noisy_step_does_not() -> None:
    monitor = TrialMonitor(trial(updates=100, above=6.0), 1)
    for number in range(PATIENCE):
        monitor.observe(step(float(number), 100.0 if number == 1 else 2.0))
    assert monitor.stop is None
    for number in range(PATIENCE, 40):
        monitor.observe(step(float(number), 9.0))
    assert "training diverges" in str(monitor.stop)


def test_training_ends_at_the_target_and_probes_do_not() -> None:
    for kind, stopped in (("train", True), ("probe", False)):
        monitor = TrialMonitor(trial(kind, updates=1000), 1, target=1.0)
        for number in range(60):
            monitor.observe(step(float(number), 3.0 - 0.1 * number))
        assert (monitor.stop == "the target is reached") == stopped
        assert (monitor.outcome().reached is not None) == stopped


def test_the_smoothed_loss_goes_on_from_before_the_trial() -> None:
    begun = replace(trial("train", updates=1000), before=(1.05, 20))
    monitor = TrialMonitor(begun, 1, target=1.0)
    monitor.observe(step(1.0, 0.5))
    assert monitor.stop is None
    monitor.observe(step(2.0, 0.5))
    assert monitor.stop == "the target is reached"
    assert monitor.outcome().reached_updates == 2


def test_what_servers_fit_is_kept() -> None:
    monitor = TrialMonitor(trial(), 1)
    monitor.observe({"kind": "momentum", "values": {"fitted": 0.5, "updates": 200}})
    monitor.observe({"kind": "momentum", "values": {"target": 0.9}})
    monitor.observe(step(1.0, 2.0))
    assert monitor.outcome().momentum == 0.5
    monitor.observe({"kind": "server", "values": {"momentum": 0.6}})
    assert monitor.outcome().momentum == 0.6


def test_drift_ends_training_once_there_is_a_checkpoint_to_go_on_from() -> None:
    monitor = TrialMonitor(trial("train", updates=10_000, groups=4), 1)
    for number in range(LEAST + 10):
        monitor.observe(step(float(number), 2.0, staleness=9.0))
    assert monitor.stop is None
    for _ in range(4):
        monitor.observe({"kind": "checkpoint", "values": {}})
    assert "the mean staleness is 9.00, but" in str(monitor.stop)
    assert monitor.outcome().drifted == monitor.stop


def test_training_that_has_come_close_enough_ends_at_its_next_checkpoint() -> None:
    monitor = TrialMonitor(replace(trial("train", updates=10_000, groups=2), until=1.5), 1)
    for number in range(60):
        monitor.observe(step(float(number), 3.0 - 0.05 * number))
        if number == 20:
            monitor.observe({"kind": "checkpoint", "step": 10, "values": {}})
            monitor.observe({"kind": "checkpoint", "step": 10, "values": {}})
            assert monitor.stop is None  # a checkpoint, but not close enough
    assert monitor.stop is None
    for _ in range(2):
        monitor.observe({"kind": "checkpoint", "step": 30, "values": {}})
    assert monitor.stop == "the loss has reached 1.5"
    outcome = monitor.outcome()
    assert outcome.drifted is None
    assert outcome.reached is None
    assert outcome.end == pytest.approx(3.0 - 0.05 * 49.5)  # the mean of the last 20


def test_drift_that_has_passed_at_the_checkpoint_is_none() -> None:
    monitor = TrialMonitor(trial("train", updates=10_000, groups=4), 1)
    for number in range(LEAST + 1000):
        monitor.observe(step(float(number), 2.0, staleness=9.0 if 300 < number < 500 else 3.0))
    for _ in range(4):
        monitor.observe({"kind": "checkpoint", "values": {}})
    assert monitor.stop is None
    assert monitor.outcome().drifted is None


def test_a_checkpoint_is_one_when_all_workers_have_kept_theirs() -> None:
    """Groups come to its step at different times; a fast one may have kept the next one before."""
    monitor = TrialMonitor(trial("train", updates=10_000, groups=2), 1)
    for number in range(LEAST + 10):
        monitor.observe(step(float(number), 2.0, staleness=9.0))
    for number, rank in ((50, 0), (100, 0), (150, 0)):
        monitor.observe({"kind": "checkpoint", "step": number, "values": {}}, rank)
    assert monitor.stop is None
    monitor.observe({"kind": "checkpoint", "step": 50, "values": {}}, 1)
    assert monitor.stop is not None


def test_probes_do_not_drift() -> None:
    monitor = TrialMonitor(trial("probe", updates=10_000, groups=4), 1)
    for number in range(LEAST + 10):
        monitor.observe(step(float(number), 2.0, staleness=9.0))
    assert monitor.outcome().drifted is None


def test_what_counts_as_drift() -> None:
    steady = Drift(4, 0.6)
    assert all(steady.step(value) is None for value in [3.0, 2.5, 4.0] * 200)
    assert steady.step(None) is None
    one = Drift(1, 0.9)
    assert all(one.step(0.0) is None for _ in range(300))
    assert all(one.fitted(value) is None for value in (0.85, 0.2, 0.9, 0.95, 0.5, 0.9))  # single fits are noisy
    assert one.fitted(0.5) == "the fitted momentum went from 0.85 to 0.50"


def test_a_group_that_becomes_slow_is_drift() -> None:
    """It takes eight times as long as the three others: of 25 updates one is its own. The mean of all stays 3."""
    drift = Drift(4, 0.6)
    assert all(drift.step(3.0, turn % 4) is None for turn in range(400))
    slow = [drift.step(24.0, 3) if turn % 25 == 24 else drift.step(2.125, turn % 3) for turn in range(25 * 12)]
    told = next(index for index, each in enumerate(slow) if each is not None)
    assert slow[told] == "the staleness of group 3 went from 3.0 to 5.8: compared with the others it has become slower"
    assert told + 1 == 4 * 25  # it has made four steps since
    back = [drift.step(3.0, turn % 4) for turn in range(400)]
    assert back[-1] is None  # it is as it was


def test_a_group_that_becomes_slow_between_two_parts_of_a_training_is_drift() -> None:
    """Each part alone is too short to know how it began: the next one goes on with the first steps of those before."""
    first = Drift(2, 0.9)
    assert all(first.step(1.0, turn % 2) is None for turn in range(80))
    assert [each.steps for each in first.baseline] == [40, 40]
    second = Drift(2, 0.9, first.baseline)
    assert all(second.step(1.0, turn % 2) is None for turn in range(60))
    slow = [(8.0, 1) if turn % 9 == 8 else (1 / 8, 0) for turn in range(9 * 40)]
    third, alone = Drift(2, 0.9, second.baseline), Drift(2, 0.9)
    told = [third.step(*each) for each in slow]
    assert "the staleness of group 1 went from 1.0 to 8.0: compared with the others it has become slower" in told
    assert not any(alone.step(*each) for each in slow)


def test_the_first_steps_of_a_training_go_from_trial_to_trial() -> None:
    monitor = TrialMonitor(trial("train", updates=100, groups=2), 1)
    for number in range(10):
        monitor.observe(step(float(number), 2.0, staleness=1.0 + number % 2))
    baseline = monitor.outcome().baseline
    assert baseline == (First(10, 15.0, 25.0), First())
    assert Outcome.from_value(json.loads(json.dumps(monitor.outcome().to_value()))).baseline == baseline
    later = TrialMonitor(replace(trial("train", updates=100, groups=2), baseline=baseline), 1)
    later.observe(step(0.0, 2.0, staleness=1.0))
    assert later.outcome().baseline[0] == First(11, 16.0, 26.0)
    assert TrialMonitor(trial("probe", updates=100, groups=2), 1).outcome().baseline == ()


def test_groups_that_take_irregular_times_are_no_drift() -> None:
    """Exponentially distributed times: what a group sees while it computes varies as much as it is."""
    chance = random.Random(1)
    drift = Drift(8, 0.2)
    ends, begun = [chance.expovariate(1.0) for _ in range(8)], [0] * 8
    for updates in range(20_000):
        group = min(range(8), key=lambda each: ends[each])
        assert drift.step(float(updates - begun[group]), group) is None
        begun[group], ends[group] = updates + 1, ends[group] + chance.expovariate(1.0)
