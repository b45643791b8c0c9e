"""The automatic optimizer on landscapes whose best setting is known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tune.landscape import Landscape, solve
from zmqtrain.tune import step_size
from zmqtrain.tune.machine import GIVE_UP, PROBES
from zmqtrain.tune.search import Search
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, First, Outcome, Setting, Trial

#: Eight machines that saturate at four groups.
UPDATE_S = {1: 4.0, 2: 2.0, 4: 1.0, 8: 1.0}
SPACE = Space(UPDATE_S, saturation=4, probe=40, period=400, cold=100, limit_s=4e4)


@dataclass
class Stale(Landscape):
    """Old gradients are worth less."""

    old: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 2: 0.5, 4: 0.25, 8: 0.125})

    def speed(self, setting: Setting) -> float | None:
        speed = super().speed(setting)
        return None if speed is None else speed * self.old[setting.groups]


def phases(search: Search) -> list[str]:
    found: list[str] = []
    for trial, _ in search.trials:
        if not found or found[-1] != trial.phase:
            found.append(trial.phase)
    return found


def test_the_order_of_algorithm_1() -> None:
    search, done = solve(SPACE, Landscape(UPDATE_S), target=0.01)
    assert done.reached
    assert phases(search)[:5] == ["learning rate", "groups", "cold start", "grid", "tie"] or phases(search)[:5] == [
        "learning rate", "groups", "cold start", "grid", "train"
    ]  # fmt: skip
    assert done.setting is not None
    assert (done.setting.groups, done.setting.momentum, done.setting.lr) == (4, 0.6, 0.01)  # 1 - 0.4 / 4 = 0.9 in all
    grid = [trial.setting for trial, _ in search.trials if trial.phase == "grid"]
    assert [setting.momentum for setting in grid if setting.groups == 4][:2] == [0.6, 0.3]  # the expected one, and the next below
    assert {(setting.groups, setting.lr) for setting in grid} == {(4, 0.01), (2, 0.01)}  # and half as many groups


def test_the_sweep_goes_from_high_to_low_and_stops_early() -> None:
    search, _ = solve(replace(SPACE, rates=(1e-1, 1e-4, 1e-3, 1e-2, 1e0)), Landscape(UPDATE_S), target=0.01)
    swept = [trial.setting for trial, _ in search.trials if trial.phase == "learning rate"]
    # From large steps to small ones; the last is worse, so that what is slower still is left out.
    assert swept == [Setting(1, momentum, rate) for rate in (1e0, 1e-1, 1e-2) for momentum in (0.9, 0.6)]


def test_what_wins_the_race_of_learning_rates_is_training_and_goes_on() -> None:
    search, _ = solve(replace(SPACE, saturation=1), Landscape(UPDATE_S), target=0.01)
    (won,) = [trial for trial, _ in search.trials if trial.phase == "learning rate" and trial.setting == Setting(1, 0.9, 0.01)]
    cold = next(trial for trial, _ in search.trials if trial.phase == "cold start")
    assert (won.start, cold.start) == (None, won.number)
    lost = sum(
        outcome.spent_s for trial, outcome in search.trials if trial.phase == "learning rate" and trial.setting != cold.setting
    )
    others = sum(outcome.spent_s for trial, outcome in search.trials if trial.kind == "probe" and trial.phase != "learning rate")
    assert search.search_s == pytest.approx(lost + others)


def test_more_groups_never_try_more_momentum() -> None:
    faster = {**UPDATE_S, 8: 0.5}
    search, _ = solve(replace(SPACE, update_s=faster, saturation=8), Landscape(faster), target=0.01)
    tried: dict[int, list[float]] = {}
    for trial, _ in search.trials:
        if trial.phase == "groups":
            tried.setdefault(trial.setting.groups, []).append(trial.setting.momentum)
    assert list(tried) == [2, 4, 8]
    tops = [max(momenta) for momenta in tried.values()]
    assert tops == sorted(tops, reverse=True)
    assert list(tried.values()) == [[0.8], [0.6], [0.2]]  # what acts like 0.9 with 1 - 1/g


def test_doubling_stops_where_more_groups_are_worse_in_the_same_time() -> None:
    search, _ = solve(SPACE, Stale(UPDATE_S, old={1: 1.0, 2: 0.8, 4: 0.2}), target=0.01)
    reasons = [decision.reason for decision in search.decisions() if decision.what == "groups"]
    assert any("at first 4 groups are not better than 2" in reason for reason in reasons)
    cold = next(trial for trial, _ in search.trials if trial.phase == "cold start")
    assert cold.setting.groups == 2


def test_momentum_0_halves_the_groups_after_finer_ones_were_tried() -> None:
    search, done = solve(replace(SPACE, probe=200), Landscape(UPDATE_S, best=0.55), target=0.01)
    assert done.reached
    assert done.setting is not None
    assert done.setting.groups == 2
    assert 1 - (1 - done.setting.momentum) / 2 == pytest.approx(0.55, abs=0.06)
    fine = [trial.setting for trial, _ in search.trials if trial.phase == "fine grid"]
    assert (fine[0].groups, fine[0].momentum) == (4, 0.1)  # which is worse, so 0.2 is left out
    halved = [decision for decision in search.decisions() if "half of" in decision.reason]
    assert next(decision.values["groups"] for decision in halved) == 2
    # Once halved, always so: staleness that hurt is not asked for again.
    groups = [trial.setting.groups for trial, _ in search.trials if trial.phase == "grid"]
    assert 4 not in groups[groups.index(2) :]


def test_no_momentum_beyond_those_of_the_space_is_tried() -> None:
    search, _ = solve(replace(SPACE, momenta=(0.0,)), Landscape(UPDATE_S, best=0.3), target=0.01)
    assert {trial.setting.momentum for trial, _ in search.trials} == {0.0}


def test_groups_that_are_hardly_faster_do_not_replace_fewer_that_learn_sooner() -> None:
    hardly = {1: 1.2, 2: 1.15, 4: 1.1, 8: 1.0}
    search, done = solve(replace(SPACE, update_s=hardly, saturation=8), Stale(hardly), target=0.01)
    assert done.setting == Setting(1, 0.9, 0.01)
    first = next(trial.start for trial, _ in search.trials if trial.phase == "grid")
    grid = [trial.setting.groups for trial, _ in search.trials if trial.phase == "grid" and trial.start == first]
    assert sorted(set(grid), reverse=True) == [8, 4, 2, 1]


def test_of_groups_that_can_hardly_be_told_apart_the_fewest_are_taken() -> None:
    same = dict.fromkeys(UPDATE_S, 1.0)
    _, done = solve(replace(SPACE, update_s=same, saturation=8), Landscape(same), target=0.01)
    assert done.setting == Setting(1, 0.9, 0.01)


def test_half_the_groups_must_not_be_worse_in_the_same_time() -> None:
    """Momentum 0 is the best of 8 groups, and they are twice as fast as 4."""
    fast = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}
    search, done = solve(replace(SPACE, update_s=fast, saturation=8), Landscape(fast, best=0.8), target=0.01)
    assert done.setting is not None
    assert (done.setting.groups, done.setting.momentum) == (8, 0.0)
    reasons = [decision.reason for decision in search.decisions()]
    assert any("half of 8" in reason for reason in reasons)
    assert any("4 are worse in the same time" in reason for reason in reasons)


@pytest.mark.parametrize(("gain", "rates"), [(0.95, {0.01}), (0.8, {0.01, 0.001})])
def test_a_lower_learning_rate_is_for_training_that_stands_still(gain: float, rates: set[float]) -> None:
    """And must then be better by more than the noise that it saves."""

    class Annealed(Landscape):
        """The loss stands still from 1 on, and ends lower in trials with a tenth of the learning rate."""

        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            outcome = super().run(trial, target)
            if self.state[trial.start] > 0:
                return outcome
            loss = gain if trial.kind == "probe" and trial.setting.lr < 0.005 else 1.0
            return replace(outcome, first=1.0, loss=loss, reached=None)

    search, _ = solve(replace(SPACE, limit_s=2e4), Annealed(UPDATE_S), target=1e-9)
    lower = [trial for trial, _ in search.trials if trial.phase == "grid" and trial.setting.lr == 0.001]
    assert lower
    assert search.trials[lower[0].start or 0][0].phase == "train"  # not before training has stood still
    assert {trial.setting.lr for trial, _ in search.trials if trial.kind == "train"} >= rates
    assert (0.001 in {trial.setting.lr for trial, _ in search.trials if trial.kind == "train"}) == (0.001 in rates)


def test_momentum_0_with_one_group_ends_cleanly() -> None:
    search, done = solve(SPACE, Landscape(UPDATE_S, best=-0.1), target=0.01)
    assert done.reached
    assert done.setting is not None
    assert (done.setting.groups, done.setting.momentum) == (1, 0.0)
    assert any("fewer groups are not better" in decision.reason for decision in search.decisions())


def test_a_setting_that_diverges_with_any_number_of_groups_lowers_the_rate_and_then_gives_up() -> None:
    search, done = solve(replace(SPACE, rates=(1.0,)), Landscape(UPDATE_S), target=0.01)
    assert done.setting is not None
    assert done.setting.lr == pytest.approx(0.01)
    _, hopeless = solve(SPACE, Landscape(UPDATE_S, diverges_from=1e-9), target=0.01)
    assert hopeless == Done(None, "no learning rate trains at all: even the lowest ones diverge")
    assert any("a tenth of it" in decision.reason for decision in search.decisions())


def test_training_that_diverges_after_all_goes_back_and_lowers_the_rate() -> None:
    class Treacherous(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            if trial.kind == "train" and trial.setting.lr > 5e-3:
                return Outcome(10, 10.0, 10.0, math.inf)
            return super().run(trial, target)

    search, done = solve(replace(SPACE, cold=0), Treacherous(UPDATE_S), target=0.01)
    assert done.reached
    assert done.setting is not None
    assert done.setting.lr == pytest.approx(1e-3)
    assert [decision.what for decision in search.decisions()].count("diverged") == 1

    class Hopeless(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            return Outcome(10, 10.0, 10.0, math.inf) if trial.kind == "train" else super().run(trial, target)

    _, done = solve(SPACE, Hopeless(UPDATE_S), target=0.01)
    assert not done.reached
    assert "nothing trains from here on" in done.reason


@pytest.mark.parametrize("stood", [None, "the loss stands still"])
def test_more_groups_that_diverge_soon_are_left_for_fewer(stood: str | None) -> None:
    """Their short leg in the race looked better; training goes on from the end of one group's leg, with its rate. That they also
    made no progress before is no reason to ask for anything else there."""

    class Late(Landscape):
        trained = False

        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            if trial.kind == "train" and trial.setting.groups > 1 and not self.trained:
                return Outcome(10, 10.0, 10.0, math.inf, stood=stood)
            self.trained = self.trained or trial.kind == "train"
            return super().run(trial, target)

    search, done = solve(replace(SPACE, target=0.01), Late(UPDATE_S), target=0.01)
    assert done.reached
    trained = [trial for trial, _ in search.trials if trial.kind == "train"]
    assert [trial.setting for trial in trained[:3]] == [Setting(4, 0.6, 0.01), Setting(2, 0.8, 0.01), Setting(1, 0.9, 0.01)]
    assert [trial.number - trained[0].number for trial in trained[:3]] == [0, 1, 2]  # nothing is tried in between
    assert trained[2].start is not None
    leg = search.trials[trained[2].start][0]
    assert (leg.setting, leg.start, leg.phase) == (trained[2].setting, None, "learning rate")
    assert search.search_s > 0
    assert search.search_s + search.train_s == pytest.approx(sum(outcome.spent_s for _, outcome in search.trials))


def test_ties_are_decided_by_longer_trials() -> None:
    class Close(Landscape):
        """Momentum 0.3 looks a little better than 0 at first."""

        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            outcome = super().run(trial, target)
            if trial.kind == "probe" and trial.phase == "grid" and trial.setting.lr == 0.01:
                losses = {0.6: 1.5, 0.3: 1.000, 0.0: 1.001} if trial.setting.groups == 4 else {}
                outcome = replace(outcome, loss=losses.get(trial.setting.momentum, 2.0))
            if trial.phase == "tie":
                outcome = replace(outcome, loss={0.3: 0.9, 0.0: 0.5}[trial.setting.momentum])
            return outcome

    search = Search(SPACE)
    land = Close(UPDATE_S)
    while (step := search.next()) and not isinstance(step, Done) and not (step.kind == "train" and step.phase == "train"):
        search.result(step, land.run(step))
    assert isinstance(step, Trial)
    assert step.setting == Setting(4, 0.0, 0.01)
    ties = [trial for trial, _ in search.trials if trial.phase == "tie"]
    probes = [trial for trial, _ in search.trials if trial.phase == "grid"]
    assert {trial.setting.momentum for trial in ties} == {0.0, 0.3}
    assert ties[0].updates == 2 * probes[0].updates


def test_trials_begin_where_training_stands_and_are_cut_early() -> None:
    search, _ = solve(SPACE, Landscape(UPDATE_S), target=0.01)
    trained: int | None = None
    legs = [trial for trial, _ in search.trials if trial.keeps]
    for trial, _ in search.trials:
        if trial.kind == "train" and trained is None:  # what has won the race
            assert trial.setting == next(leg for leg in legs if leg.number == trial.start).setting
        elif not trial.keeps:
            assert trial.start == trained
        if trial.number:
            assert trial.give_up_above is not None
        if trial.kind == "train":
            trained = trial.number
    second = search.trials[1][0]
    assert second.give_up_above == pytest.approx(GIVE_UP * 10)


def test_trials_with_any_number_of_groups_take_the_same_time() -> None:
    space = replace(SPACE, saturation=8, probe=80)
    search, _ = solve(space, Landscape(UPDATE_S), target=0.01)
    for trial, _ in search.trials:
        if trial.kind == "probe" and trial.phase != "tie":  # what may be gone on from is shorter
            takes_s = 64 if trial.keeps else 80
            assert trial.updates * UPDATE_S[trial.setting.groups] == pytest.approx(takes_s, rel=0.02)


@pytest.mark.parametrize(("noise", "chosen"), [(0.4, 0.6), (0.2, 0.3)])
def test_less_momentum_than_makes_up_for_asynchrony_must_be_clearly_better(noise: float, chosen: float) -> None:
    """By more than both standard errors."""

    class Noisy(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            outcome = super().run(trial, target)
            if trial.kind == "train" or trial.setting.groups != 4 or trial.phase == "groups":
                return outcome
            by = {0.6: 1.0, 0.3: 1.5, 0.0: 1.7}[trial.setting.momentum]
            return replace(outcome, loss=outcome.first - by, noise=noise)

    search, _ = solve(replace(SPACE, cold=0), Noisy(UPDATE_S), target=1.0)
    trained = next(trial for trial, _ in search.trials if trial.phase == "train")
    assert trained.setting == Setting(4, chosen, 0.01)


def test_a_model_that_has_not_begun_to_learn_is_trained_until_trials_tell_something() -> None:
    class Plateau(Landscape):
        """Nothing happens in the first three trainings."""

        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            outcome = super().run(trial, target)
            if outcome.diverged or self.state[trial.start] < 1.5:
                return outcome
            loss = 10 * (1 + trial.setting.lr)
            return replace(outcome, first=10.0, loss=loss, end=loss)

    search, done = solve(SPACE, Plateau(UPDATE_S, diverges_from=0.02), target=0.01)
    cold = [trial for trial, _ in search.trials if trial.phase == "cold start"]
    assert len(cold) > 1
    assert [trial.start for trial in cold[1:]] == [trial.number for trial in cold[:-1]]
    assert {trial.setting.lr for trial in cold} == {0.01}  # the highest that is as good as the others
    assert done.reached


def test_fewer_groups_are_the_answer_to_a_loss_that_rises() -> None:
    class Rising(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            outcome = super().run(trial, target)
            rises = trial.kind == "probe" and trial.setting.groups == 4 and trial.phase != "groups"
            return replace(outcome, loss=2 * outcome.first) if rises else outcome

    search, done = solve(SPACE, Rising(UPDATE_S), target=0.01)
    grid = [trial.setting for trial, _ in search.trials if trial.phase == "grid"]
    assert [setting.momentum for setting in grid if setting.groups == 4] == [0.6, 0.3]
    assert {setting.lr for setting in grid} == {0.01}
    assert any("too many groups for this learning rate" in decision.reason for decision in search.decisions())
    assert done.setting is not None
    assert done.setting.groups == 2


@settings(max_examples=40, deadline=None)
@given(best=st.floats(0.0, 0.95), saturation=st.sampled_from([1, 4, 8]), limit_s=st.sampled_from([1500, 3000, 10000]))
def test_all_probes_together_take_their_share_of_the_time_limit(best: float, saturation: int, limit_s: float) -> None:
    """Before the first long training, too: at most a probe of each kind more."""
    space = replace(SPACE, saturation=saturation, limit_s=limit_s)
    search, done = solve(space, Landscape(UPDATE_S, best=best))
    assert done.setting is not None
    begun = next(number for number, (trial, _) in enumerate(search.trials) if trial.kind == "train" and trial.phase == "train")
    before = [outcome.spent_s for trial, outcome in search.trials[:begun] if trial.kind == "probe"]
    assert sum(before) <= 0.1 * limit_s + 2 * max(before)
    assert search.share <= 0.1 + 2 * max(before) / limit_s


def test_probes_are_shorter_where_the_time_limit_is_near() -> None:
    search, _ = solve(replace(SPACE, probe=400, limit_s=4e4), Landscape(UPDATE_S))
    lengths = {trial.updates * UPDATE_S[trial.setting.groups] for trial, _ in search.trials if trial.phase == "grid"}
    assert max(lengths) == pytest.approx(4000 / PROBES, rel=0.02)


def test_what_is_left_out_for_want_of_time_is_what_promised_least() -> None:
    search, _ = solve(replace(SPACE, saturation=8, limit_s=2400, cold=10), Landscape(UPDATE_S, best=0.45))
    assert any("too little to try more here" in decision.reason for decision in search.decisions())
    grid = [trial.setting for trial, _ in search.trials if trial.phase == "grid"]
    assert grid[0].momentum == pytest.approx(0.2)  # what acts like 0.9 among 8 groups


def test_more_groups_that_are_far_behind_cost_one_probe() -> None:
    class Behind(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            outcome = super().run(trial, target)
            return replace(outcome, loss=2 * outcome.loss) if trial.setting.groups == 2 and trial.phase == "groups" else outcome

    search, _ = solve(SPACE, Behind(UPDATE_S), target=0.01)
    assert [trial.setting for trial, _ in search.trials if trial.phase == "groups"] == [Setting(2, 0.8, 0.01)]


@dataclass
class Falling(Landscape):
    """A tenth of the learning rate takes a part of the loss away at once, and makes progress a tenth as fast."""

    part: float = 0.2

    def run(self, trial: Trial, target: float | None = None) -> Outcome:
        low = trial.setting.lr < self.rate / 2 and trial.number > 3
        begin = self.state[trial.start]
        probe = low and trial.kind == "probe"
        as_fast = replace(trial, setting=replace(trial.setting, lr=self.rate)) if low else trial
        outcome = super().run(as_fast, None if probe else target)
        if trial.until is not None and outcome.end is not None and outcome.end <= trial.until:  # it ends where it was to
            speed = self.speed(trial.setting)
            assert speed is not None
            updates = max(1, math.ceil((begin - math.log(trial.until)) / speed))
            self.state[trial.number] = begin - speed * updates
            end = math.exp(self.state[trial.number])
            return replace(outcome, updates=updates, seconds=updates * outcome.update_s, loss=end, end=end, reached=None)
        fallen = (1 - self.part) * math.exp(begin)
        return replace(outcome, loss=fallen, end=fallen) if probe else outcome


@pytest.fixture
def asked_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that fall exponentially, as here, reach a target soon."""
    monkeypatch.setattr(step_size, "SOON", 0)


@pytest.mark.usefixtures("asked_in_any_case")
def test_near_the_target_the_learning_rate_falls() -> None:
    space = replace(SPACE, target=1.0)
    search, done = solve(space, Falling(UPDATE_S), target=1.0)
    assert done.reached
    assert done.setting == Setting(4, 0.6, pytest.approx(0.001))
    falls = [(trial, outcome) for trial, outcome in search.trials if trial.phase == "fall"]
    assert falls[0][1].loss > 1.0 >= falls[-1][1].loss  # once too early, which tells when
    before = list(dict.fromkeys(trial.until for trial, _ in search.trials if trial.kind == "train" and trial.phase == "train"))
    assert before[0] == pytest.approx(1.4)
    assert before[1] == pytest.approx(1.2, rel=0.02)  # half way; 1 / 0.8 would be sooner
    assert before[-1] is None
    assert len(falls) == 2
    reasons = [decision.reason for decision in search.decisions() if decision.what == "learning rate"]
    assert any("a tenth would bring the loss from" in reason for reason in reasons)
    assert any("at once" in reason for reason in reasons)
    _, plain = solve(SPACE, Falling(UPDATE_S), target=1.0)
    assert plain.setting == Setting(4, 0.6, 0.01)  # which no target is known to


def test_a_target_that_is_near_needs_no_lower_rate() -> None:
    search, done = solve(replace(SPACE, target=1.0), Falling(UPDATE_S), target=1.0)
    assert done.setting == Setting(4, 0.6, 0.01)
    assert not [trial for trial, _ in search.trials if trial.phase == "fall"]
    assert any("as it is" in decision.reason for decision in search.decisions())


def test_a_trial_knows_what_its_smoothed_loss_goes_on_from() -> None:
    search, _ = solve(replace(SPACE, target=1.0), Landscape(UPDATE_S), target=1.0)
    for trial, _ in search.trials:
        if trial.start is None:
            assert trial.before is None
        else:
            assert trial.before is not None
            assert trial.before == search.trials[trial.start][1].smoothed


@pytest.mark.usefixtures("asked_in_any_case")
def test_a_learning_rate_that_gains_nothing_by_falling_stays() -> None:
    search, done = solve(replace(SPACE, target=1.0), Falling(UPDATE_S, part=-0.1), target=1.0)
    assert done.setting == Setting(4, 0.6, 0.01)
    begun = [search.trials[trial.start or 0][1].end for trial, _ in search.trials if trial.phase == "fall"]
    assert begun == [pytest.approx(1.4, rel=0.02), pytest.approx(1 / 0.98, rel=0.02)]  # asked once more, at the end


def test_after_a_drift_speeds_are_measured_anew() -> None:
    """Four groups were the fewest that are as fast as any; then a host has become slow, and one is."""
    slower, began = dict.fromkeys(UPDATE_S, 4.0), (First(60, 60.0, 60.0),)

    class Drifting(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            first = trial.phase == "train" and self.update_s != slower
            if first:
                trial = replace(trial, updates=100)
            outcome = super().run(trial, target)
            if first:
                self.update_s = slower
                return replace(outcome, reached=None, drifted="everything is slower")
            return replace(outcome, baseline=began)

    search, done = solve(SPACE, Drifting(UPDATE_S), target=0.01)
    at = next(number for number, (_, outcome) in enumerate(search.trials) if outcome.drifted)
    after = [trial for trial, _ in search.trials[at + 1 :]]
    trained = [trial for trial in after if trial.kind == "train"]
    assert [trial.baseline for trial in trained] == [(), *[began] * (len(trained) - 1)]  # what was before is forgotten
    assert [(trial.phase, trial.setting.groups) for trial in after[:4]] == [("speed", each) for each in UPDATE_S]
    assert {trial.setting.groups for trial in after[4:]} == {1, 4}  # the new g*, and as before
    assert done.setting is not None
    assert done.setting.groups == 1
    assert done.reached


def test_the_time_limit_ends_it() -> None:
    search, done = solve(replace(SPACE, limit_s=3000), Landscape(UPDATE_S))
    assert "the time is up" in done.reason
    assert search.search_s + search.train_s < 3600


@settings(max_examples=60, deadline=None)
@given(
    best=st.floats(-0.5, 0.99),
    rate=st.sampled_from([1e-4, 1e-3, 1e-2]),
    wild=st.floats(0.5, 1.0),
    saturation=st.sampled_from([1, 2, 4, 8]),
    share=st.sampled_from([0.1, 0.2, 0.3]),
)
def test_the_search_takes_no_more_than_its_share(best: float, rate: float, wild: float, saturation: int, share: float) -> None:
    space = replace(SPACE, saturation=saturation, share=share, limit_s=6e4)
    search, done = solve(space, Landscape(UPDATE_S, best=best, rate=rate, wild=max(wild, 0.91)))
    assert done.setting is None or "the time is up" in done.reason
    if done.setting is not None:
        assert search.share <= share * 1.02
    numbers = [trial.number for trial, _ in search.trials]
    assert numbers == list(range(len(numbers)))


def test_a_resumed_search_goes_on_as_the_one_before() -> None:
    whole, done = solve(SPACE, Landscape(UPDATE_S, best=0.45), target=0.01)
    land = Landscape(UPDATE_S, best=0.45)
    search = Search(SPACE)
    asked = []
    while not isinstance(step := search.next(), Done):
        asked.append(step)
        search.result(step, land.run(step, 0.01))
        search = Search(SPACE).replay(json.loads(json.dumps(search.to_value())))
    assert step == done
    assert asked == [trial for trial, _ in whole.trials]
    assert not search.decisions()
    with pytest.raises(ValueError, match="it belongs to a different search"):
        Search(replace(SPACE, limit_s=1.0)).replay(whole.to_value())


def test_only_the_trial_that_was_asked_for_is_heard() -> None:
    search = Search(SPACE)
    trial = search.next()
    assert isinstance(trial, Trial)
    with pytest.raises(ValueError, match="not the trial that is running"):
        search.result(replace(trial, number=7), Outcome(1, 1.0, 1.0, 1.0))


def test_every_decision_has_a_reason() -> None:
    search, _ = solve(SPACE, Landscape(UPDATE_S, best=0.45), target=0.01)
    decisions = search.decisions()
    assert decisions[-1].what == "done"
    assert all(len(decision.reason) > 10 for decision in decisions)
    json.dumps([dict(decision.values) for decision in decisions])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saturation": 3}, "not one of the numbers"),
        ({"momenta": ()}, "at least one momentum"),
        ({"share": 1.0}, "share of"),
    ],
)
def test_no_space(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPACE, **change)  # type: ignore[arg-type]
