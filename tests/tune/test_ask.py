"""What makes a search change the steps of a training that is under way, and what does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tune.landscape import Landscape, solve
from zmqtrain.tune.search import ASK_AGAIN, ASK_FIRST, Search, first_leg
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

SPACE = Space({1: 1.0}, saturation=1, limit_s=1e6, target=0.1)


@dataclass
class Floors:
    """A loss falls exponentially to a floor that is lower with smaller steps; no noise. Larger steps are faster up to a limit."""

    limit: float = 1.0
    """Of the pace, beyond which it gets slower again."""
    floor: float = 0.0
    """At a pace of 1; less in proportion below."""
    dies_at: float = math.inf
    """Updates of steps at the full pace after which the loss is where it began."""
    state: dict[int | None, tuple[float, float]] = field(default_factory=lambda: {None: (2.0, 0.0)})
    """The loss without its floor, and updates at the full pace."""

    def run(self, trial: Trial, target: float | None = None) -> Outcome:
        above, wild = self.state[trial.start]
        pace = trial.setting.lr / (1 - trial.setting.momentum)
        speed, floor = 0.02 * min(pace, self.limit**2 / pace), self.floor * pace
        losses = []
        for _ in range(trial.updates):
            wild += pace >= 0.9
            above = 2.0 if wild >= self.dies_at and pace >= 0.9 else above * math.exp(-speed)
            losses.append((len(losses) + 1.0, above + floor))
        self.state[trial.number] = above, wild if wild < self.dies_at else 0.0
        outcome = Outcome.of(
            losses, updates=trial.updates, seconds=float(trial.updates), target=target, smooth=20, scored=trial.scored
        )
        return replace(outcome, noise=0.0)


def searched(land: Floors, space: Space = SPACE, most: int = 300) -> tuple[Search, Done]:
    search = Search(space)
    for _ in range(most):
        step = search.next()
        if isinstance(step, Done):
            return search, step
        search.result(step, land.run(step, space.target if step.keeps or step.kind == "train" else None))
    raise AssertionError("the search does not end")


def asks(search: Search) -> list[tuple[Trial, Outcome]]:
    return [(trial, outcome) for trial, outcome in search.trials if trial.phase == "ask"]


def test_a_loss_that_falls_fast_is_left_alone() -> None:
    search, done = searched(Floors(), replace(SPACE, target=0.5))
    assert done.reached
    assert not asks(search)


def test_steps_that_stand_at_their_floor_become_smaller_until_the_target_is_below_it() -> None:
    search, done = searched(Floors(floor=0.3))
    assert done.reached
    assert done.setting is not None
    assert done.setting.momentum < 0.9
    taken = [trial.setting.momentum for trial, _ in asks(search)]
    assert taken[0] == 0.6  # less momentum before a lower rate
    assert "gets from" in " ".join(decision.reason for decision in search.decisions())


@settings(max_examples=40, deadline=None)
@given(floor=st.floats(0.05, 0.4), target=st.sampled_from([0.1, 0.03]))
def test_a_setting_that_stands_still_is_left_within_a_bounded_number_of_updates(floor: float, target: float) -> None:
    """Without noise: by the time at which as much has been trained again. Then other steps are tried, and get further."""
    search, done = searched(Floors(floor=floor), replace(SPACE, target=target))
    assert done.reached
    trained = first_leg(SPACE)
    stood: list[Setting] = []
    for trial, outcome in search.trials:
        if trial.kind == "train":
            assert outcome.updates <= max(ASK_FIRST * first_leg(SPACE), ASK_AGAIN * trained)
            trained += outcome.updates
            assert trial.setting not in stood  # what was left is not gone back to
        elif trial.phase == "ask" and outcome.loss < search.trials[trial.number - 1][1].loss / 2:
            stood.append(search.trials[trial.number - 1][0].setting)
    assert search.search_s < 0.5 * search.train_s


@settings(max_examples=60, deadline=None)
@given(best=st.floats(0.0, 0.95), rate=st.sampled_from([1e-3, 1e-2, 1e-1]))
def test_without_noise_no_step_is_taken_to_what_was_seen_to_be_slower(best: float, rate: float) -> None:
    space = Space({1: 1.0}, saturation=1, limit_s=1e6, target=0.01)
    land = Landscape({1: 1.0}, best=best, rate=rate, diverges_from=5 * rate)
    search, done = solve(space, land, target=0.01)
    assert done.reached
    used = [trial.setting for trial, _ in search.trials if trial.kind == "train"]
    for trial, outcome in asks(search):
        before = next(each for each, _ in reversed(search.trials[: trial.number]) if each.kind == "train").setting
        speed, other = land.speed(before), land.speed(trial.setting)
        after = [setting for each, _ in search.trials[trial.number + 1 :] if (setting := each.setting) and each.kind == "train"]
        if speed is not None and (other is None or other <= speed) and after and outcome.reached is None:
            assert after[0] != trial.setting
    assert land.speed(used[-1]) is not None


def test_a_loss_that_has_risen_goes_back_to_where_it_was_lowest() -> None:
    search, done = searched(Floors(dies_at=80, floor=0.0))
    assert done.reached
    back = [decision.reason for decision in search.decisions() if "back to there" in decision.reason]
    assert back
    (first, _), *_ = asks(search)
    assert first.start is not None
    assert search.trials[first.start][1].end == min(
        outcome.end for _, outcome in search.trials[: first.number] if outcome.end is not None
    )


@dataclass
class Passing(Floors):
    """The floor is gone after so many updates."""

    until: int = 800

    def run(self, trial: Trial, target: float | None = None) -> Outcome:
        outcome = super().run(trial, target)
        self.until -= trial.updates if trial.kind == "train" else 0
        self.floor *= self.until > 0
        return outcome


def test_what_has_come_to_smaller_steps_may_come_back_to_larger_ones() -> None:
    search, done = searched(Passing(floor=0.3), replace(SPACE, target=0.0005))
    assert done.reached
    used = [trial.setting for trial, _ in search.trials if trial.kind == "train"]
    paces = [setting.lr / (1 - setting.momentum) for setting in used]
    assert min(paces) < 0.15 < paces[0]
    assert paces[-1] > 2 * min(paces)


@pytest.mark.parametrize(("noise", "clear"), [(0.0, True), (1.0, False)])
def test_the_fall_of_a_loss_has_an_error(noise: float, clear: bool) -> None:
    losses = [(float(update), 2.0 - 0.01 * update + noise * (-1) ** update) for update in range(60)]
    outcome = Outcome.of(losses, updates=60, seconds=60.0)
    assert outcome.scored == 20
    assert outcome.fall == pytest.approx(0.01)
    assert (outcome.fall > 2 * outcome.fall_error) == clear
    assert Outcome.from_value(outcome.to_value()) == outcome
    assert Outcome(1, 1.0, 1.0, 1.0).fall == 0.0


def test_smaller_steps_lower_the_momentum_first() -> None:
    search = Search(SPACE)
    found = [Setting(1, 0.9, 0.1)]
    for _ in range(4):
        found.append(search._smaller_steps(found[-1]))
    assert [(each.momentum, each.lr) for each in found] == [(0.9, 0.1), (0.6, 0.1), (0.0, 0.1), (0.0, 0.025), (0.0, 0.00625)]
