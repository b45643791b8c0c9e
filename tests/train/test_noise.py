"""What the noise of modelled devices does to times, over many draws."""

from __future__ import annotations

import statistics

import pytest

from zmqtrain.train.device.noise import SMALLEST, Noise

STEPS = 20_000


def factors(noise: Noise, seed: int = 1, rank: int = 0, steps: int = STEPS) -> list[float]:
    return [noise.factor(seed, rank, step) for step in range(steps)]


def test_constant_is_one() -> None:
    assert set(factors(Noise(), steps=10)) == {1.0}


@pytest.mark.parametrize(("noise", "deviation"), [
    (Noise("normal", 0.1), 0.1),
    (Noise("normal", 0.3), 0.3),
    (Noise("exponential"), 1.0),
    (Noise("exponential", 0.1), 1.0),
])  # fmt: skip
def test_the_mean_is_one_and_the_deviation_what_is_asked_for(noise: Noise, deviation: float) -> None:
    drawn = factors(noise)
    error = deviation / STEPS**0.5
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=4 * error)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.04)


def test_no_step_takes_no_time() -> None:
    drawn = factors(Noise("normal", 2.0))
    assert min(drawn) == SMALLEST
    assert min(factors(Noise("exponential"))) > 0


def test_an_exponential_distribution_has_no_memory() -> None:
    drawn = factors(Noise("exponential"))
    beyond = [factor - 1 for factor in drawn if factor > 1]
    assert len(beyond) / STEPS == pytest.approx(0.3679, abs=0.015)
    assert statistics.fmean(beyond) == pytest.approx(1.0, abs=0.05)


def test_stragglers_come_as_often_and_take_as_long_as_they_should() -> None:
    drawn = factors(Noise(straggler_chance=0.05, straggler_factor=4.0))
    assert set(drawn) == {1.0, 4.0}
    assert drawn.count(4.0) / STEPS == pytest.approx(0.05, abs=0.006)


def test_the_same_steps_straggle_whatever_the_distribution() -> None:
    settings = {"straggler_chance": 0.1, "straggler_factor": 1000.0}
    slow = [step for step, factor in enumerate(factors(Noise("constant", **settings), steps=300)) if factor > 1]
    normal = factors(Noise("normal", 0.1, **settings), steps=300)
    assert [step for step, factor in enumerate(normal) if factor > 100] == slow


def test_the_same_seed_gives_the_same_and_others_do_not() -> None:
    noise = Noise("exponential")
    drawn = factors(noise, steps=50)
    assert factors(noise, steps=50) == drawn
    assert noise.factor(1, 0, 7) == drawn[7], "whatever was drawn before"
    for other in (factors(noise, seed=2, steps=50), factors(noise, rank=1, steps=50)):
        assert not set(other) & set(drawn)


def test_workers_are_independent() -> None:
    noise = Noise("normal", 0.2)
    assert abs(statistics.correlation(factors(noise, rank=0), factors(noise, rank=1))) < 0.03
    drawn = factors(noise)
    assert abs(statistics.correlation(drawn[1:], drawn[:-1])) < 0.03
