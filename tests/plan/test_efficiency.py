"""Hardware efficiency: the paper's law, and a queue of coroutines that must keep to it."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.plan.efficiency import (
    FC_SERVER,
    PATH,
    Efficiency,
    GroupStep,
    MeasuredModel,
    Model,
    PaperModel,
    Station,
    efficiencies,
    efficiency,
    saturation,
)
from zmqtrain.simulate.clock import run_virtual

#: t_conv(32) = 5.7 t_fc by the network, and enough arithmetic to keep 4 groups of 8 busy.
FIGURE = PaperModel(machines=32, conv_compute_s=20.0, conv_network_s=5.7 / 32, fc_s=1.0)


def powers(model: Model) -> dict[int, Efficiency]:
    return {each.groups: each for each in efficiencies(model)}


def test_the_papers_figure() -> None:
    found = powers(FIGURE)
    assert [round(found[groups].seconds, 1) for groups in (1, 2, 4, 8, 16, 32)] == [6.7, 1.9, 1, 1, 1, 1]
    assert [found[groups].bottleneck for groups in (1, 2, 4, 32)] == [PATH, PATH, FC_SERVER, FC_SERVER]
    assert saturation(list(found.values())) == 4
    assert found[8].group_step_s == 8.0


@pytest.mark.parametrize(
    ("step", "seconds", "bottleneck"),
    [
        (GroupStep(4, 1, 8.0), 2.0, PATH),
        (GroupStep(4, 1, 8.0, (Station("a", 3.0), Station("b", 7.0, shared=False))), 3.0, "a"),
        (GroupStep(4, 1, 8.0, (Station("a", 1.0), Station("b", 7.0, shared=False)), depth=2), 1.75, "b"),
        (GroupStep(4, 1, 8.0, (Station("a", 1.0),), depth=2), 1.0, "a"),
    ],
)
def test_the_largest_term_limits(step: GroupStep, seconds: float, bottleneck: str) -> None:
    found = efficiency(step)
    assert (found.seconds, found.bottleneck) == (seconds, bottleneck)


def test_the_fewest_groups_that_are_as_fast_as_any() -> None:
    def of(*seconds: float) -> list[Efficiency]:
        return [Efficiency(GroupStep(2**power, 1, 1.0), each, PATH) for power, each in enumerate(seconds)]

    assert saturation(of(4.0, 2.0, 1.01, 1.0)) == 4
    assert saturation(of(4.0, 2.0, 1.0, 0.5)) == 8
    assert saturation(of(1.0, 1.5, 2.0)) == 1  # more may be slower: each has a network's part of its own
    with pytest.raises(UsageError, match="no possible number of groups"):
        saturation([])


def test_what_was_measured_goes_before_formulas() -> None:
    model = MeasuredModel(4, {4: 3.0, 2: 2.0, 1: 5.0}, fc_s=1.0)
    assert [each.seconds for each in efficiencies(model)] == [4.0, 1.5, 1.5]
    assert [each.seconds for each in efficiencies(MeasuredModel(4, lambda size: 4.0 / size, 1.0, merged=False))] == [
        1.25,
        1.25,
        1.25,
    ]
    with pytest.raises(UsageError, match=r"t_conv was not measured for groups of 2; it was measured for 1, 4"):
        efficiencies(MeasuredModel(4, {4: 3.0, 1: 5.0}, 1.0))


def test_pipelining_hides_the_fc_phase_and_adds_staleness() -> None:
    plain, piped = powers(PaperModel(8, 16.0, 0.0, 1.0)), powers(PaperModel(8, 16.0, 0.0, 1.0, depth=2))
    assert plain[1].seconds == 3.0
    assert (piped[1].seconds, piped[1].bottleneck) == (2.0, "the convolutions")
    assert (plain[2].step.staleness, piped[2].step.staleness) == (1, 3)


async def queue(model: Model, groups: int, rounds: int) -> float:
    """Seconds an update, of groups that compute and then queue for the one FC server."""
    step = model.step(groups)
    (fc_s,) = (station.seconds for station in step.stations if station.shared)
    (conv_s,) = (station.seconds for station in step.stations if not station.shared)
    server = asyncio.Lock()
    done: list[float] = []
    clock = asyncio.get_running_loop().time

    async def group() -> None:
        for _ in range(rounds):
            await asyncio.sleep(conv_s)
            async with server:
                await asyncio.sleep(fc_s)
                done.append(clock())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(groups):
            tasks.create_task(group())
    first, last = groups, (rounds - 1) * groups  # whole rounds, once all have found their places
    return (done[last] - done[first]) / (last - first)


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(
    "model", [FIGURE, PaperModel(32, 40.0, 0.02, 0.3), PaperModel(32, 3.0, 0.5, 2.0)], ids=["figure", "slow", "fc"]
)
def test_a_queue_of_constant_times_keeps_to_the_law(model: PaperModel, groups: int) -> None:
    predicted = efficiency(model.step(groups))
    measured = run_virtual(queue(model, groups, rounds=12))
    assert measured == pytest.approx(predicted.seconds, rel=0.02 if predicted.bottleneck == FC_SERVER else 0.05)
