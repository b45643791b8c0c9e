"""The planner against all plans there are, within memory, and in time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.networks import LINK, alexnet, conv, linear, small
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.layers import LayerShape, Stage, stages
from zmqtrain.plan.link import Changes, Link
from zmqtrain.plan.memory import memory
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.planner import plan
from zmqtrain.plan.price import PlanPrice, Times, price
from zmqtrain.plan.problem import Problem, placed_of, plan_of


def brute_force(problem: Problem) -> PlanPrice | None:
    """The best of all plans that fit."""
    every = itertools.product(*(problem.options(stage).placed for stage in problem.layers))
    prices = (price(problem, placed) for placed in every)
    fitting = [each for each in prices if problem.memory_bytes is None or each.memory.total <= problem.memory_bytes]
    return min(fitting, key=lambda each: each.step_s, default=None)


@settings(max_examples=24)
@given(
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from([3, 16, 200]),
    st.sampled_from([Paper(), Ours(), Ours(per_host=2)]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.floats(1e7, 1e12),
    st.sampled_from([1e-7, 1e-4]),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_same_optimum_as_brute_force(
    processes: int, batch: int, pricing: Paper | Ours, overlap: float, flops: float, alpha: float, tight: float, limited: bool
) -> None:
    link = Link(alpha, 1e-8, 1e-10)
    layers = small()[1:]
    problem = Problem(layers, batch, processes, link, pricing, overlap, flops)
    if limited:  # between what the thriftiest plan needs and what the fastest does
        each = [[problem.memory(stage, how).total for how in problem.options(stage).placed] for stage in layers]
        least, most = (sum(function(row) for row in each) for function in (min, max))
        problem = replace(problem, memory_bytes=least + tight * (most - least) + 1)
    found, expected = plan(problem), brute_force(problem)
    assert expected is not None
    assert found.price.step_s == pytest.approx(expected.step_s, rel=1e-12)
    if problem.memory_bytes is not None:
        assert found.price.memory.total <= problem.memory_bytes


def test_all_four_layers_too() -> None:
    problem = Problem(small(), 64, 4, LINK, overlap=0.7, flops_per_s=1e9)
    expected = brute_force(problem)
    assert expected is not None
    assert plan(problem).price.step_s == pytest.approx(expected.step_s, rel=1e-12)


@pytest.mark.parametrize(("overlap", "most_ways"), [(0.0, 100_000), (1.0, 6_000_000)])
def test_150_layers_and_4096_processes_are_few_paths(overlap: float, most_ways: int) -> None:
    """Of 24^150 plans; with overlap, thousands of paths to a state may count (`python -m benchmarks planner` has the seconds)."""
    layers = [replace(layer.head, name=f"{layer.name}.{number}") for number in range(19) for layer in alexnet()][:150]
    problem = Problem(stages(layers), 8192, 4096, LINK, overlap=overlap, flops_per_s=1e12)
    assert len(problem.layers) == 150
    found = plan(problem)
    assert found.ways < most_ways
    assert price(problem, found.placed).step_s == found.price.step_s
    assert len({how.grid for how in found.placed}) > 1


class Counting(Ours):
    """Notes how many tables of changes are priced."""

    tables: ClassVar[list[int]] = []

    def changes(
        self, before: Stage, sources: Sequence[Placed], after: Stage, targets: Sequence[Placed], *, back: bool = False
    ) -> Changes:
        if len(sources) > 1:
            self.tables.append(len(sources) * len(targets))
        return super().changes(before, sources, after, targets, back=back)


def test_changes_of_layers_alike_are_priced_once_and_all_together() -> None:
    """Also for both searches, without overlap and with it: of 720,720 processes there are 240 grids."""
    Counting.tables.clear()
    problem = Problem(alexnet(), 2 * 720_720, 720_720, LINK, Counting(), overlap=1.0, flops_per_s=1e12)
    found = plan(problem)
    assert found.ways < 30_000_000
    keys = {
        problem.pricing.change_key(one, other)
        for one, other in zip(problem.layers, [*problem.layers[1:], problem.layers[-1]], strict=True)
    }
    assert len(Counting.tables) == 2 * len(keys) < 2 * len(problem.layers)


def test_strips_are_proposed_that_have_the_shortest_edges() -> None:
    """Squares of a square image, strips of the width of a wide one; of the height alone where messages take longer than bytes."""

    def strips(height: int, width: int, latency_s: float) -> set[str]:
        layers = [
            LayerShape(f"{number}", "conv", (8, height, width), (8, height, width), 584, (3, 3), padding=(1, 1), flops=10**12)
            for number in range(3)
        ]
        problem = Problem(stages(layers), 1, 16, Link(latency_s, 8e-9), Ours(), flops_per_s=1e12)
        return {each.strips for each in plan(problem).plan if each.choice == "domain"}

    assert strips(512, 512, 1e-7) == {"4x4"}
    assert strips(128, 4096, 1e-7) == {"width"}
    assert strips(512, 512, 1e-2) == {"height"}


@pytest.mark.parametrize(("wide", "waited"), [(1, 0.0), (4, 0.0), (2, 0.5)])
def test_columns_of_a_grid_of_strips_are_waited_for(wide: int, waited: float) -> None:
    """They follow the rows, when the interior has been computed."""
    layer = LayerShape("conv", "conv", (8, 64, 64), (8, 64, 64), 584, (3, 3), padding=(1, 1), flops=10**9)
    (stage,), placed = stages([layer]), Placed("domain", Grid(4, 1), wide)
    problem = Problem((stage,), 4, 4, LINK, Ours(), overlap=1.0, flops_per_s=1e10)
    cost = Ours().layer(stage, placed, 4, first=False)
    exposed_s = Times.of(problem, stage, placed, cost).waits_s - sum(problem.seconds(stage, placed))
    assert exposed_s == pytest.approx(waited * (LINK.seconds(cost.halo) + LINK.seconds(cost.halo_back)), abs=1e-12)


def test_the_trivial_ends() -> None:
    """Many weights: model; many activations: batch; images larger than batches: domain."""
    heavy = stages([linear(name, 2000, 2000) for name in "abc"])
    assert {how.choice for how in plan(Problem(heavy, 8, 8, LINK)).placed} == {"model"}
    light = stages([linear(name, 8, 8) for name in "abc"])
    assert {how.choice for how in plan(Problem(light, 4096, 8, LINK)).placed} == {"batch"}
    images = stages([conv(name, 4, 4, 64) for name in "abc"])
    found = plan(Problem(images, 2, 8, LINK))
    assert {str(how) for how in found.placed} == {"domain 4x2"}


def test_perfect_overlap_hides_weight_gradients_under_the_backward_of_the_layers_before() -> None:
    layers = stages([conv("conv", 8, 8, 32), linear("fc", 1000, 1000)])
    placed = [Placed("batch", Grid(1, 4))] * 2
    slow = Problem(layers, 64, 4, Link(0, 1e-9), flops_per_s=1e9)
    none, half, perfect = (price(replace(slow, overlap=share), placed) for share in (0.0, 0.5, 1.0))
    fc_s, conv_s = (2 * 3 / 4 * 4 * stage.weights * 1e-9 for stage in reversed(layers))
    assert none.exposed_s == pytest.approx(fc_s + conv_s)
    backward_s = none.layers[0].backward_s
    assert fc_s < backward_s / 2
    assert half.exposed_s == perfect.exposed_s == pytest.approx(conv_s)  # the first layer's has nothing to hide under
    assert none.without_overlap_s == perfect.without_overlap_s == pytest.approx(none.step_s)
    fast = price(replace(slow, overlap=1.0, flops_per_s=1e12), placed)
    assert fast.exposed_s == pytest.approx(fc_s + conv_s - fast.layers[0].backward_s)


def test_memory_by_choice() -> None:
    stage = stages([conv("c", 4, 8, 16)])[0]

    def of(choice: str, rows: int, columns: int) -> tuple[float, float]:
        found = memory(stage, Placed(choice, Grid(rows, columns)), 32, word_bytes=4, optimizer_words=2)  # type: ignore[arg-type]
        assert (found.gradients, found.optimizer) == (found.weights, 2 * found.weights)
        return found.weights, found.activations

    weights, inputs, outputs = 4 * 288, 4 * 32 * 4 * 256, 4 * 32 * 8 * 256
    assert of("batch", 1, 4) == (weights, (inputs + outputs) / 4)
    assert of("model", 2, 2) == (weights / 2, inputs / 2 + outputs / 4)
    assert of("domain", 2, 2) == (weights, (inputs + outputs) / 4)
    assert of("whole", 2, 2) == (weights, (inputs + outputs) / 2)


def test_what_cannot_be_says_why() -> None:
    problem = Problem(small(), 2, 16, LINK, flops_per_s=1e9)
    first = problem.options(small()[0]).excluded
    assert first["batch"] == "a batch of 2 samples cannot be divided into 16 parts"
    assert first["model 16x1"] == "there would be more rows than its 8 outputs"
    assert first["domain 16x1"] == "there would be more rows than the 8 of its image"
    assert "domain 8x2" not in first
    assert problem.options(small()[2]).excluded["domain"] == "its input is not an image"
    other = LayerShape("mystery", "other", (4,), (4,), 10)
    assert "kind other" in problem.options(stages([other])[0]).excluded["model"]
    assert "times are not known" in Problem(small(), 2, 2, LINK).options(small()[0]).excluded["whole"]


def test_no_plan_at_all() -> None:
    with pytest.raises(UsageError, match="no layer with weights"):
        Problem((), 4, 4, LINK)
    with pytest.raises(UsageError, match=r"least one sample and one process, not 0 and 4"):
        Problem(small(), 0, 4, LINK)
    tight = Problem(small(), 64, 4, LINK, memory_bytes=1000)
    with pytest.raises(UsageError, match=r"no plan fits in memory: a process needs at least .* may use only 1,000 B"):
        plan(tight)
    with pytest.raises(
        UsageError,
        match=r"no grid of 13 processes divides any layer for a batch of 2.*fc2: batch: .* into 13 parts.*more rows than its 10",
    ):
        plan(Problem(small()[3:], 2, 13, LINK))


def test_a_plan_goes_out_and_comes_back() -> None:
    problem = Problem(alexnet(), 2048, 32, LINK)
    found = plan(problem)
    again = Plan.read(found.plan.values())
    assert placed_of(problem, again) == list(found.placed)
    assert price(problem, placed_of(problem, again)).exposed_s == found.price.exposed_s
    assert plan_of(problem, found.placed) == found.plan
    divided = Plan((LayerPlan("0", "domain", Grid(4, 1), "2x2"), LayerPlan("1", "domain", Grid(4, 1))))
    assert Plan.read(divided.values()) == divided


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": "fc9"}, r"another model.*no layer 'fc9' \(did you mean 'fc\d'\?\); the plan has no entry for fc8"),
        ({"grid": "2x8"}, "must have the same number of processes"),
        ({"choice": "domain", "grid": "32x1"}, "domain 32x1 of layer fc8 is impossible: its input is not an image"),
        ({"choice": "domain", "grid": "32x1", "strips": "2x8"}, "strips '2x8' are 16 parts of an image, but the grid has 32 rows"),
        ({"choice": "domain", "grid": "32x1", "strips": "wide"}, "strips 'wide' must be"),
        ({"strips": "width"}, "strips are for the choice domain"),
    ],
)
def test_plans_that_do_not_fit(change: dict[str, str], message: str) -> None:
    problem = Problem(alexnet(), 2048, 32, LINK)
    values = plan(problem).plan.values()
    values[-1].update(change)
    with pytest.raises(UsageError, match=message):
        placed_of(problem, Plan.read(values))
    with pytest.raises(UsageError, match="for 32 processes, but the group has 16"):
        placed_of(replace(problem, processes=16), plan(problem).plan)


def test_a_model_that_must_stay_whole() -> None:
    """Without that it would be divided: there are more processes than samples to divide."""
    problem = Problem(alexnet(), 64, 64, LINK)
    assert any(how.grid.rows > 1 for how in plan(problem).placed)
    assert all(how.grid.rows == 1 for how in plan(replace(problem, whole_model=True)).placed)
    with pytest.raises(UsageError, match="float16"):
        plan(replace(problem, batch=1, whole_model=True))
