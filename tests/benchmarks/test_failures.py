"""What killed workers cost, from the times of steps."""

from __future__ import annotations

from itertools import accumulate

import pytest

from benchmarks.failures import LEFT_OUT, Ran


def test_lost_is_what_steps_took_beyond_twice_the_median() -> None:
    steps = [0.1] * (LEFT_OUT + 10)
    steps += [0.6, *[0.1] * 20, 0.15, *[0.1] * 5, 0.3]  # a kill, another that nobody notices at first, and its late entry
    ends = list(accumulate([100.0, *steps]))
    first = ends[LEFT_OUT + 10] + 0.05
    ran = Ran(ends, [first, first + 2.0])
    assert ran.step_s == pytest.approx(0.1)
    assert ran.lost_s() == pytest.approx([0.5, 0.2])


def test_slow_steps_before_the_first_kill_are_not_its() -> None:
    ends = list(accumulate([100.0, *[0.1] * 30, 2.0, *[0.1] * 10]))
    assert Ran(ends, [ends[-2]]).lost_s() == [0.0]
