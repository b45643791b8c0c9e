"""What the paper proves of its partners, checked for every world size."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.exchange.gossip.schedule import Partners, Schedule, Shape, is_power_of_two

WORLDS = range(1, 65)
#: Where the work grows with the world's third power: all small ones, and of the others primes, powers, and their neighbours.
FEWER_WORLDS = (*range(2, 21), 23, 24, 27, 31, 32, 33, 36, 48, 63, 64)


def sends(schedule: Schedule, step: int) -> list[int]:
    """To whom each rank sends."""
    partners = [schedule.partners(step, rank) for rank in range(schedule.world)]
    return [each.to for each in partners if each is not None]


def shapes(world: int) -> list[Shape]:
    return ["dissemination", "ring", "random", *(["hypercube"] if is_power_of_two(world) else [])]  # type: ignore[list-item]


def mixed(weights: np.ndarray, schedule: Schedule, step: int) -> np.ndarray:
    """Everybody's weights (a row each) after the half-half averages of a step."""
    result = weights.copy()
    for rank in range(schedule.world):
        partners = schedule.partners(step, rank)
        if partners is not None:
            (source,) = partners.sources
            result[rank] = (weights[rank] + weights[source]) / 2
    return result


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rotation", [False, True])
def test_each_step_is_a_permutation_without_fixed_points(world: int, rotation: bool) -> None:
    for shape in shapes(world):
        schedule = Schedule(world, seed=3, shape=shape, rotation=rotation)
        for step in range(3 * max(1, schedule.period)):
            partners = [schedule.partners(step, rank) for rank in range(world)]
            if world == 1:
                assert partners == [None]
                continue
            to = [each.to for each in partners if each is not None]
            assert sorted(to) == list(range(world)), (shape, step)
            assert all(each is not None and rank not in (each.to, *each.sources) for rank, each in enumerate(partners))
            assert all(partners[each] is not None and partners[each].sources == (rank,) for rank, each in enumerate(to))  # type: ignore[union-attr]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rotation", [False, True])
def test_a_period_reaches_everybody(world: int, rotation: bool) -> None:
    for shape in [shape for shape in shapes(world) if shape in ("dissemination", "hypercube")]:
        schedule = Schedule(world, seed=5, shape=shape, rotation=rotation)
        assert schedule.period == math.ceil(math.log2(world))
        for period in range(4):
            weights = np.eye(world)  # unit vectors: what has come from whom
            for step in range(period * schedule.period, (period + 1) * schedule.period):
                weights = mixed(weights, schedule, step)
            assert (weights > 0).all(), (shape, period)
            np.testing.assert_array_equal(weights.sum(axis=0), np.ones(world))  # dyadic numbers: exact
            np.testing.assert_array_equal(weights.sum(axis=1), np.ones(world))


@pytest.mark.parametrize(
    ("world", "before"), [(2, Fraction(1, 2)), (4, Fraction(1, 4)), (8, Fraction(1, 8)), (16, Fraction(1, 16))]
)
def test_powers_of_two_reach_the_exact_mean_at_the_end_of_a_period_and_not_before(world: int, before: Fraction) -> None:
    for shape in ("dissemination", "hypercube"):
        for seed in range(3):
            schedule = Schedule(world, seed, shape)
            weights = np.eye(world)
            for step in range(schedule.period):
                deviation = np.abs(weights - 1 / world).max()
                weights = mixed(weights, schedule, step)
            assert deviation == (before if world > 2 else Fraction(1, 2))
            np.testing.assert_array_equal(weights, np.full((world, world), 1 / world))


def met(schedule: Schedule, steps: int) -> float:
    """The share of ordered pairs that have met directly."""
    pairs = {(rank, to) for step in range(steps) for rank, to in enumerate(sends(schedule, step))}
    return len(pairs) / (schedule.world * (schedule.world - 1))


@pytest.mark.parametrize("world", FEWER_WORLDS)
def test_rotation_lets_all_pairs_meet(world: int) -> None:
    """Whatever the seed, and also with nothing but the first step of each period."""
    for seed in (world, 3 * world + 1):
        for shape in [shape for shape in shapes(world) if shape != "random"]:
            schedule = Schedule(world, seed, shape)
            assert met(schedule, schedule.rounds * schedule.period) == 1, (seed, shape)
            firsts = {
                (rank, to) for turn in range(schedule.rounds) for rank, to in enumerate(sends(schedule, turn * schedule.period))
            }
            assert len(firsts) == world * (world - 1), (seed, shape)
        unrotated = Schedule(world, seed, rotation=False)
        assert met(unrotated, world * unrotated.period) == pytest.approx(unrotated.period / (world - 1))


@given(st.integers(2, 24), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_all_pairs_meet_whenever_one_begins_to_count(world: int, seed: int, start: int) -> None:
    schedule = Schedule(world, seed)
    steps = range(start, start + (schedule.rounds + 1) * schedule.period)
    assert len({(rank, to) for step in steps for rank, to in enumerate(sends(schedule, step))}) == world * (world - 1)


def test_orders_take_turns_between_periods_only() -> None:
    schedule = Schedule(8, seed=1)
    unrotated = Schedule(8, seed=1, rotation=False)
    assert unrotated.partners(0, 3) == Partners(4, (2,))
    assert unrotated.partners(2, 7) == Partners(3, (3,))
    first = [sends(schedule, step) for step in range(3)]
    # Within a period the shuffle stays: two sends at a distance of 1 are one at a distance of 2.
    assert [first[0][first[0][rank]] for rank in range(8)] == first[1]
    assert [first[1][first[1][rank]] for rank in range(8)] == first[2]
    second = [sends(schedule, step) for step in range(3, 6)]
    assert second != first
    assert [second[0][second[0][rank]] for rank in range(8)] == second[1]
    assert [sends(schedule, step) for step in range(24, 27)] == first, "after p rounds the first comes again"


@given(st.integers(2, 64), st.integers(0, 2**63 - 1), st.integers(0, 10**9))
def test_nothing_but_the_arguments_matters(world: int, seed: int, step: int) -> None:
    schedule = Schedule(world, seed)
    first = sends(schedule, step)
    state, numpy_state = random.getstate(), np.random.get_state()[1]
    assert sends(Schedule(world, seed), step) == first
    assert random.getstate() == state
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert sorted(first) == list(range(world))


def test_seeds_differ() -> None:
    assert len({tuple(sends(Schedule(16, seed), 0)) for seed in range(20)}) == 20
    assert len({tuple(sends(Schedule(16, 1, "random"), step)) for step in range(20)}) == 20


@given(st.integers(2, 40), st.integers(0, 1000), st.integers(0, 1000))
def test_unbalanced_random_partners(world: int, seed: int, step: int) -> None:
    schedule = Schedule(world, seed, "random", balanced=False)
    to = sends(schedule, step)
    assert all(rank != each for rank, each in enumerate(to))
    for rank in range(world):
        partners = schedule.partners(step, rank)
        assert partners is not None
        assert partners.sources == tuple(other for other in range(world) if to[other] == rank)


def test_unbalanced_choices_are_spread_evenly() -> None:
    counts = np.zeros((5, 5))
    for step in range(2000):
        for rank, to in enumerate(sends(Schedule(5, 9, "random", balanced=False), step)):
            counts[rank, to] += 1
    assert (np.abs(counts[~np.eye(5, dtype=bool)] - 500) < 100).all()  # five standard deviations


def test_bad_worlds() -> None:
    with pytest.raises(ValueError, match="power of two as the number of peers, not 6"):
        Schedule(6, 0, "hypercube")
    with pytest.raises(ValueError, match="a world of 0"):
        Schedule(0, 0)
    with pytest.raises(ValueError, match="no rank 4 in a world of 4"):
        Schedule(4, 0).partners(0, 4)
