"""Whether training gets anywhere, on losses whose course is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from zmqtrain.tune.progress import Progress, mean_of
from zmqtrain.tune.trial import Watch


def heard(loss: Callable[[int], float], updates: int, *, after: int = 60, below: float | None = None, seed: int = 1) -> int | None:
    """Updates after which it says that this gets nowhere; none if it never does. Each loss varies by 0.2."""
    chance, progress = random.Random(seed), Progress(Watch(after, goal=0.0, below=below))
    for update in range(updates):
        if progress.add(loss(update) + chance.gauss(0, 0.2)) is not None:
            return update + 1
    return None


@pytest.mark.parametrize("seed", range(20))
def test_what_stands_still_is_seen_within_three_times_the_least(seed: int) -> None:
    found = heard(lambda _: 2.3, 2000, seed=seed)
    assert found is not None
    assert 60 < found <= 300


def test_a_loss_that_rises_is_no_progress() -> None:
    assert heard(lambda update: 2.0 + 0.002 * update, 500) == 84  # at the second look


def test_what_stands_still_from_some_time_on_is_seen_before_it_has_trained_five_times_as_long() -> None:
    found = [heard(lambda update: 2.3 * math.exp(-min(update, 300) / 150), 1500, seed=seed) for seed in range(20)]
    assert sum(each is not None and each > 300 for each in found) >= 15


def test_what_falls_is_left_alone() -> None:
    found = [heard(lambda update: 2.3 * math.exp(-update / 150), 300, seed=seed) for seed in range(20)]
    assert found.count(None) >= 19


def test_what_is_above_another_setting_with_fewer_updates_is_asked_though_it_falls() -> None:
    assert heard(lambda update: 2.3 - 0.004 * update, 200, below=1.0) == 60
    assert heard(lambda update: 2.3 - 0.008 * update, 200, below=2.5) is None


def test_it_may_pass_again() -> None:
    progress = Progress(Watch(16, goal=0.0))
    losses = [1.0] * 40 + [0.1] * 200
    found = [progress.add(loss) for loss in losses]
    assert found[39] is not None
    assert "stands still" in found[39]
    assert None in found[40:]


def test_no_fewer_losses_than_a_mean_with_an_error_needs() -> None:
    progress = Progress(Watch(1))
    assert [progress.add(1.0) for _ in range(15)] == [None] * 15
    assert mean_of([1.0]) == (1.0, 0.0)
    assert mean_of([1.0, 3.0]) == (2.0, 1.0)
