"""The fitted momentum beside the theorem's, of a quadratic trained by asynchronous groups with real arithmetic and no network."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch

from zmqtrain.server.momentum_sensor import EVERY, LEAST, MomentumSensor, Sensors


def train(groups: int, explicit: float, updates: int, *, seed: int = 1, noise: float = 1.0) -> MomentumSensor:
    """Groups take exponentially distributed times; the curvature is 1."""
    rng = np.random.default_rng(seed)
    w, velocity = torch.full((300,), 2.0, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    sensor = MomentumSensor(w, groups)
    reads = {group: (0, w.clone()) for group in range(groups)}
    queue = [(rng.exponential(), group) for group in range(groups)]
    heapq.heapify(queue)
    for version in range(1, updates + 1):
        now, group = heapq.heappop(queue)
        read, there = reads[group]
        gradient = there + noise * torch.from_numpy(rng.standard_normal(300))
        velocity = explicit * velocity + gradient
        w = w - 0.02 * velocity
        sensor.applied(gradient, read, version, w)
        reads[group] = (version, w.clone())
        heapq.heappush(queue, (now + rng.exponential(), group))
    return sensor


@pytest.mark.parametrize("explicit", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_the_fit_beside_the_rule(groups: int, explicit: float) -> None:
    fit = train(groups, explicit, 1500).fit()
    assert fit is not None
    assert fit[0] == pytest.approx(1 - (1 - explicit) / groups, abs=0.07)


def test_too_little_was_seen() -> None:
    assert train(2, 0.0, LEAST - 10).fit() is None
    sensor = train(2, 0.0, LEAST + 30)
    assert sensor.fit() is not None
    assert sensor.updates >= LEAST


def test_it_forgets() -> None:
    sensor = train(2, 0.0, 4000)
    assert sensor.updates < 1000


def test_nothing_moves_or_everything_explodes() -> None:
    still = MomentumSensor(torch.zeros(4), 1)
    wild = MomentumSensor(torch.zeros(4), 1)
    for version in range(1, 300):
        still.applied(torch.zeros(4), version - 1, version, torch.zeros(4))
        wild.applied(torch.full((4,), 1e30), version - 1, version, torch.full((4,), float("inf")))
    assert still.fit() is None
    assert wild.fit() is None


def test_it_says_something_every_so_many_updates() -> None:
    sensors = Sensors()
    assert [sensors.due(1) for _ in range(2 * EVERY)].count(True) == 2
    assert sensors.fitted() == (None, 0)
