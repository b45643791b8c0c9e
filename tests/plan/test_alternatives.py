"""The paper's rules, alternatives to a plan, sweeps and charts."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.plan.networks import LINK, alexnet, small
from zmqtrain.charts import Bar, Bars, draw
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.alternatives import alternatives, flip
from zmqtrain.plan.bars import COLOURS, panels
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.planner import plan
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.rules import pure, same_grid
from zmqtrain.plan.sweep import powers_up_to, sweep
from zmqtrain.topology.rounded import rounded_time


def test_pure_plans_say_when_they_cannot_be() -> None:
    batch, model = pure(Problem(small(), 4, 16, LINK))
    assert batch.obstacle == "batch of conv1: a batch of 4 samples cannot be divided into 16 parts"
    assert model.obstacle == "model 16x1 of conv1: there would be more rows than its 8 outputs"
    assert pure(Problem(small(), 64, 2, LINK))[1].obstacle is None
    problem = Problem(small(), 64, 4, LINK)
    assert price(problem, same_grid(problem, Grid(1, 4))).exposed_s == pure(problem)[0].price.exposed_s


def test_alternatives_are_the_best_of_each_choice_with_neighbours_as_planned() -> None:
    problem = Problem(alexnet(), 2048, 32, LINK)
    planned = plan(problem)
    for index in range(8):
        found = alternatives(problem, planned.placed, index)
        assert found[0].placed == planned.placed[index]
        for each in found:
            changed = list(planned.placed)
            changed[index] = each.placed
            more_s = price(problem, changed).exposed_s - planned.price.exposed_s
            assert each.seconds - found[0].seconds == pytest.approx(more_s, abs=1e-12)


def test_a_flip_is_where_the_runner_up_begins_to_win() -> None:
    problem = Problem(alexnet(), 2048, 512, LINK)
    placed = list(plan(problem).placed)

    def gap(changed: Problem, index: int, how: Placed) -> float:
        other = [*placed[:index], how, *placed[index + 1 :]]
        return price(changed, other).exposed_s - price(changed, placed).exposed_s

    batches = bandwidths = 0
    for index in range(8):
        found = flip(problem, placed, index, alternatives(problem, placed, index))
        assert found is not None
        how = found.runner_up.placed
        if found.batch is not None:
            batches += 1
            step = 3 if found.batch > problem.batch else -3  # the search ends within a few samples
            assert gap(replace(problem, batch=found.batch - step), index, how) >= 0
            assert gap(replace(problem, batch=found.batch + step), index, how) < 0
        if found.bandwidth is not None:
            bandwidths += 1
            for factor, wins in ((1.01, True), (0.99, False)):
                byte_s = 8 / (found.bandwidth * (factor if found.bandwidth > 48e9 else 1 / factor))
                assert (gap(replace(problem, link=replace(LINK, byte_s=byte_s)), index, how) < 0) == wins
    assert batches >= 6
    assert bandwidths >= 1


def test_nothing_flips_where_there_is_one_way() -> None:
    problem = Problem(alexnet()[5:], 8, 1, LINK)
    planned = plan(problem)
    assert flip(problem, planned.placed, 0, alternatives(problem, planned.placed, 0)) is None


def test_a_sweep_scales_three_ways() -> None:
    points = list(sweep(lambda size, batch: Problem(alexnet(), batch, size, LINK), [1, 8, 64], [512], part=8))
    assert [(point.scaling, point.processes, point.batch) for point in points] == [
        ("strong", 1, 512), ("strong", 8, 512), ("strong", 64, 512),
        ("weak", 1, 8), ("weak", 8, 64), ("weak", 64, 512),
        ("beyond", 64, 64), ("beyond", 128, 64), ("beyond", 256, 64), ("beyond", 512, 64),
    ]  # fmt: skip
    for point in points:
        assert point.planned is not None
        if point.batch_s is not None:
            assert point.planned.price.step_s <= point.batch_s
        if point.domain_s is not None:
            assert point.planned.price.step_s <= point.domain_s
    beyond = points[-4:]
    assert [point.batch_s is None for point in beyond] == [False, True, True, True]
    assert beyond[1].domain_s is not None
    assert [point.planned.price.step_s for point in beyond if point.planned] == sorted(
        (point.planned.price.step_s for point in beyond if point.planned), reverse=True
    )
    assert beyond[0].summary.count("model") >= 1
    (none,) = [p for p in sweep(lambda size, batch: Problem(small(), 1, 67, LINK), [67], [1], part=1) if p.scaling == "strong"]
    assert none.planned is None
    assert "no grid of 67 processes" in none.summary
    assert powers_up_to(12) == [1, 2, 4, 8, 12]
    assert powers_up_to(8) == [1, 2, 4, 8]


def test_a_chart_s_bars_are_as_high_as_their_seconds() -> None:
    bars = (Bar("1x2 <a>", {"dW": 2.0}), Bar("2x1", {"dX": 3.0, "all-gather": 1.0}, marked=True))
    svg = ElementTree.fromstring(draw("title & more", [Bars("panel", bars, COLOURS, rounded_time)]))
    rects = [each for each in svg.iter("{http://www.w3.org/2000/svg}rect") if len(each)]
    heights = {each[0].text: float(each.attrib["height"]) for each in rects}
    assert set(heights) == {"1x2 <a>: dW 2 s", "2x1: dX 3 s", "2x1: all-gather 1 s"}
    assert heights["2x1: dX 3 s"] == 3 * heights["2x1: all-gather 1 s"] == 1.5 * heights["1x2 <a>: dW 2 s"]


def test_the_bars_of_a_plan() -> None:
    planned = plan(Problem(alexnet(), 2048, 32, LINK))
    same, connected = panels([planned])
    assert [bar.label for bar in same.bars] == ["1x32", "2x16", "4x8", "8x4", "16x2", "32x1", "planned"]
    assert [bar.label for bar in same.bars if bar.marked] == ["2x16"]
    assert [bar.label for bar in connected.bars if bar.marked] == ["8x4"]
    assert sum(same.bars[-1].parts.values()) == pytest.approx(planned.price.communication_s)
