"""Fixed settings, the rule of thumb, and Bayesian optimization, on a landscape; and the trade-off over groups."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.tune.landscape import Landscape
from tests.tune.test_search import SPACE, UPDATE_S
from zmqtrain.errors import UsageError
from zmqtrain.tune.baselines import Bayesian, Fixed, RuleOfThumb, strategies
from zmqtrain.tune.curves import EveryNumberOfGroups, penalties
from zmqtrain.tune.machine import Machine
from zmqtrain.tune.plot import curves_svg, trials_svg
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

LIMITED = replace(SPACE, limit_s=8000.0)


def solve(machine: Machine, landscape: Landscape, target: float | None = 0.01) -> Done:
    for _ in range(1000):
        step = machine.next()
        if isinstance(step, Done):
            return step
        machine.result(step, landscape.run(step, target))
    raise AssertionError("it does not end")


def test_fixed_groups_take_the_best_learning_rate() -> None:
    machine = Fixed(LIMITED, 1)
    done = solve(machine, Landscape(UPDATE_S))
    assert done.reached
    assert done.setting == Setting(1, 0.9, 0.01)
    assert [trial.setting.lr for trial, _ in machine.trials] == [1e-4, 1e-3, 1e-2, 1e-1, 1e-2]
    hopeless = Fixed(LIMITED, 8)  # 0.9 and 8 groups are 0.9875 in all
    assert solve(hopeless, Landscape(UPDATE_S)).reason == "every learning rate diverges"


def test_of_learning_rates_that_are_as_good_the_highest_is_taken() -> None:
    class Flat(Landscape):
        def run(self, trial: Trial, target: float | None = None) -> Outcome:
            return replace(super().run(trial, target), loss=2.30 + trial.setting.lr / 10 if trial.setting.lr < 0.05 else 9.0)

    machine = Fixed(LIMITED, 1)
    solve(machine, Flat(UPDATE_S), target=None)
    assert machine.trials[-1][0].setting.lr == 0.01


def test_the_rule_of_thumb_drops_the_rate_twice_and_searches_nothing() -> None:
    machine = RuleOfThumb(LIMITED)
    done = solve(machine, Landscape(UPDATE_S), target=None)
    assert [trial.setting.lr for trial, _ in machine.trials] == pytest.approx([0.01, 0.001, 0.0001])
    assert machine.search_s == 0
    assert machine.train_s == pytest.approx(8000, rel=0.01)
    assert not done.reached
    starts = [trial.start for trial, _ in machine.trials]
    assert starts == [None, 0, 1]


class Estimator:
    """Asks for what it is given, in turn, and keeps what it is told."""

    def __init__(self, settings: list[tuple[int, float, float]]) -> None:
        self.settings, self.told = list(settings), []

    def ask(self) -> Any:
        groups, momentum, rate = self.settings.pop(0)

        class Asked:
            def suggest_categorical(self, name: str, among: list[int]) -> int:
                assert groups in among
                return groups

            def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
                value = momentum if name == "momentum" else rate
                assert low <= value <= high
                return value

        return Asked()

    def tell(self, asked: Any, loss: float) -> None:
        self.told.append(loss)


def test_the_bayesian_baseline_trains_with_the_best_of_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = Estimator([(8, 0.9, 0.01), (1, 0.9, 0.001), (4, 0.6, 0.01)])
    monkeypatch.setattr("zmqtrain.tune.baselines._study", lambda seed: estimator)
    machine = Bayesian(LIMITED, 3, seed=1)
    done = solve(machine, Landscape(UPDATE_S))
    assert done.setting == Setting(4, 0.6, 0.01)
    assert done.reached
    assert estimator.told[0] == 1e9  # it diverged, which must not end the study
    assert estimator.told[2] < estimator.told[1]


def test_optuna_itself() -> None:
    pytest.importorskip("optuna")
    first, again = (strategies(LIMITED, trials=6, seed=3)["bayesian"]() for _ in range(2))
    assert solve(first, Landscape(UPDATE_S)).setting is not None
    assert len([trial for trial, _ in first.trials if trial.kind == "probe"]) == 6
    again.replay(json.loads(json.dumps(first.to_value())))  # the seed makes it ask the same
    assert [trial for trial, _ in again.trials] == [trial for trial, _ in first.trials]


def test_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **more: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(UsageError, match=r"needs optuna: pip install 'zmqtrain\[tune\]'"):
        strategies(LIMITED, trials=6, seed=3)["bayesian"]()


def test_the_trade_off_over_groups() -> None:
    machine = EveryNumberOfGroups(SPACE, most_updates=3000)
    assert solve(machine, Landscape(UPDATE_S)).reason == "all numbers of groups were tried"
    points = {point.setting.groups: point for point in machine.points()}
    assert list(points) == [1, 2, 4, 8]
    assert [points[groups].setting.momentum for groups in points] == [0.9, 0.9, 0.6, 0.3]
    rows = {row["groups"]: row for row in penalties(list(points.values()))}
    assert [rows[groups]["he"] for groups in rows] == [4, 2, 1, 1]
    assert rows[1]["se"] == pytest.approx(1.0, abs=0.01)
    assert rows[4]["total"] == 1.0
    assert rows[8]["se"] > 1.0


def test_groups_that_never_reach_the_target() -> None:
    machine = EveryNumberOfGroups(SPACE, most_updates=10)
    solve(machine, Landscape(UPDATE_S))
    rows = list(penalties(machine.points()))
    assert all(row["total"] is None and row["seconds"] is None for row in rows)
    assert curves_svg("none", rows).count("<circle") == len(rows)  # their speed is known all the same


def test_pictures() -> None:
    machine = strategies(LIMITED, trials=1, seed=1)["omnivore"]()
    solve(machine, Landscape(UPDATE_S))
    picture = trials_svg("a <search>", machine.trials)
    assert picture.startswith("<svg")
    assert "a &lt;search&gt;" in picture
    assert picture.count("<title>") == len(machine.trials)
    assert ">x</text>" in picture  # something diverged
    assert trials_svg("nothing yet", []).endswith("</svg>\n")
    every = EveryNumberOfGroups(SPACE, most_updates=3000, lr=0.01)
    solve(every, Landscape(UPDATE_S))
    curves = curves_svg("curves", list(penalties(every.points())))
    assert curves.count("<polyline") == 3
    assert curves.count("<circle") == 12


def test_a_picture_of_trials_without_a_sound_loss() -> None:
    trial = Trial(0, Setting(1, 0.0, 0.1), 5, "probe", "grid", "because")
    assert "diverged" in trials_svg("bad", [(trial, Outcome.of([], updates=0, seconds=0.0))])
    both = trials_svg("with what starting takes", [(trial, Outcome(9, 1.0, 2.0, 1.0, whole_s=4.0))] * 2)
    assert "time: 8.0 s in all, of which 2.0 s in steps" in both
    assert both.count('x="253.75"') == 1  # from 3 s on
