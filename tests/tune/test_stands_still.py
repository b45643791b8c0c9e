"""The search where a setting that looks best at first gets nowhere: losses update by update, heard as a run's are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from zmqtrain.tune.job import PARTS
from zmqtrain.tune.monitor import TrialMonitor
from zmqtrain.tune.search import Search
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

UPDATE_S = 0.01
SPACE = Space({1: UPDATE_S}, saturation=1, limit_s=3600.0, target=0.45)
#: Updates to the target with a learning rate of 0.01, which never dies.
BEST = round(150 * math.log(2.3 / 0.45))


@dataclass
class Dying:
    """With the highest rate and momentum the loss falls fastest, until the model is dead; whatever goes on from there is, too."""

    dies: int = 50
    noise: float = 0.1
    target: float | None = SPACE.target
    state: dict[int | None, tuple[float, int, bool]] = field(default_factory=lambda: {None: (2.3, 0, False)})
    """Where trials end: the loss without noise, updates with the highest rate, and whether it is dead."""

    def speed(self, setting: Setting) -> float:
        return min(setting.lr / (1 - setting.momentum) / 0.1, 1.4) / 150

    def run(self, trial: Trial) -> Outcome:
        monitor = TrialMonitor(trial, 1, self.target, SPACE.smooth)
        loss, wild, dead = self.state[trial.start]
        chance = random.Random(trial.start or 0)
        every = math.ceil(trial.updates / PARTS) if trial.kind == "train" else trial.updates
        for update in range(1, trial.updates + 1):
            wild += trial.setting.lr >= 0.1 and trial.setting.momentum >= 0.9
            dead = dead or wild >= self.dies
            loss = 2.3 if dead else loss * math.exp(-self.speed(trial.setting))
            heard = max(0.01, loss + chance.gauss(0, self.noise))
            values = {"loss": heard, "seconds": UPDATE_S}
            monitor.observe({"kind": "step", "time": update * UPDATE_S, "step": update, "values": values}, 0)
            if update % every == 0:
                monitor.observe({"kind": "checkpoint", "step": update}, 0)
            if monitor.stop is not None:
                break
        self.state[trial.number] = loss, wild, dead
        return monitor.outcome()


def solve(space: Space, land: Dying) -> tuple[Search, Done]:
    search = Search(space)
    for _ in range(200):
        step = search.next()
        if isinstance(step, Done):
            return search, step
        search.result(step, land.run(step))
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("dies", [20, 50, 100])
def test_a_setting_that_dies_is_left_for_one_that_was_behind(dies: int, noise: float) -> None:
    search, done = solve(SPACE, Dying(dies, noise))
    assert done.reached
    assert done.setting is not None
    assert done.setting != Setting(1, 0.9, 0.1)
    took = sum(outcome.updates for _, outcome in search.trials)
    assert took <= 2 * (BEST + dies), f"{took} updates, where the best setting needs {BEST}"


def test_it_says_why_it_asks_and_what_goes_on() -> None:
    search, _ = solve(replace(SPACE, momenta=(0.9,)), Dying(100))
    reasons = [decision.reason for decision in search.decisions()]
    assert any("stands still" in reason or "another setting had" in reason or "half as many" in reason for reason in reasons)
    assert any("continues instead" in reason for reason in reasons)


def test_what_never_dies_is_not_asked_for_anything() -> None:
    search, done = solve(SPACE, Dying(10**9, 0.05))
    assert done.reached
    assert done.setting == Setting(1, 0.9, 0.1)  # near the target, too, which it reaches soon
    assert [trial.setting.momentum for trial, _ in search.trials if trial.kind == "train"] == [0.9] * 4
    took = sum(outcome.updates for _, outcome in search.trials)
    assert took <= 1.6 * BEST / 1.4
    assert search.share < 0.3


def test_a_job_without_a_target_is_asked_too() -> None:
    """Its training ends by the time limit, whatever the loss."""
    search, done = solve(replace(SPACE, target=None, limit_s=60.0), Dying(100, target=None))
    assert done.setting is not None
    assert done.setting != Setting(1, 0.9, 0.1)
    assert search.trials[-1][1].loss < 0.5


@dataclass
class Flattering(Dying):
    """Nothing dies, but smaller steps look good in a short trial, and get nowhere after it."""

    def run(self, trial: Trial) -> Outcome:
        monitor = TrialMonitor(trial, 1, self.target, SPACE.smooth)
        loss, wild, dead = self.state[trial.start]
        pace = min(1.0, trial.setting.lr / (1 - trial.setting.momentum))
        every = math.ceil(trial.updates / PARTS) if trial.kind == "train" else trial.updates
        for update in range(1, trial.updates + 1):
            loss *= math.exp(-0.01 * pace**2)
            seems = 0.7 * loss if trial.phase == "ask" and pace < 1 else loss
            values = {"loss": seems * (1 + 0.05 * (-1) ** update), "seconds": UPDATE_S}
            monitor.observe({"kind": "step", "time": update * UPDATE_S, "step": update, "values": values}, 0)
            if update % every == 0:
                monitor.observe({"kind": "checkpoint", "step": update}, 0)
            if monitor.stop is not None:
                break
        self.state[trial.number] = loss, wild, dead
        return monitor.outcome()


def test_steps_that_have_become_too_small_become_larger_again() -> None:
    search, done = solve(SPACE, Flattering())
    assert done.reached
    reasons = [decision.reason for decision in search.decisions()]
    assert any("is no worse" in reason for reason in reasons)
