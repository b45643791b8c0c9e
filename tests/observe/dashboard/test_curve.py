"""A curve keeps its shape, in bounded memory, whatever order its values come in."""

from __future__ import annotations

import random

from zmqtrain.observe.dashboard.curve import Curve


def test_few_values_are_kept_as_they_are() -> None:
    curve = Curve(8)
    for step in (2, 0, 1):
        curve.add(step, 10.0 + step, float(step))
    curve.add(1, 11.5, 3.0)  # of another worker: the point is the mean
    assert curve.to_dict() == {"step": [0, 1, 2], "at": [10.0, 11.5, 12.0], "value": [0.0, 2.0, 2.0]}


def test_many_values_share_points() -> None:
    curve, steps = Curve(8), list(range(1000))
    random.Random(1).shuffle(steps)
    for step in steps:
        curve.add(step, float(step), 2.0 * step)
    found = curve.to_dict()
    assert 4 <= len(found["step"]) <= 8
    assert found["step"] == sorted(found["step"])
    assert found["value"] == [2 * step for step in found["step"]], "means of values belong to means of steps"
    assert found["at"][-1] == 999.0
