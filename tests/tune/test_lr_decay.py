"""When the learning rate may decay."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zmqtrain.tune.lr_decay import CLOSE, CLOSER, LrDecay


@pytest.mark.parametrize(("begin", "until"), [(9.0, CLOSE), (None, CLOSE), (1.2, CLOSER)])
def test_it_is_asked_near_the_target(begin: float | None, until: float) -> None:
    decay = LrDecay(2.0, None if begin is None else 2 * begin)
    assert decay.until == pytest.approx(2 * until)
    assert decay.due(2 * until - 0.01)
    assert not decay.due(2 * until + 0.01)
    assert decay.near(2 * until + 0.01)
    assert not decay.due(None)


def test_what_a_probe_has_shown_tells_when() -> None:
    decay = LrDecay(1.0, 9.0)
    assert not decay.probed(1.5, 1.2)
    assert decay.until == pytest.approx(1.25)  # of which it takes a fifth away
    assert decay.probed(1.25, 0.99)
    assert decay.until is None


def test_each_time_nearer_and_never_where_nothing_can_be_gained() -> None:
    decay = LrDecay(1.0, 9.0)
    asked = [1.5]
    while not decay.probed(asked[-1], 1.001) and decay.until is not None:  # it always seems to be enough the next time
        asked.append(decay.until)
    assert len(asked) <= 10
    assert asked == sorted(asked, reverse=True)
    assert all(later - 1 <= 0.71 * (sooner - 1) for sooner, later in pairwise(asked))
    worse = LrDecay(1.0, 1.1)
    assert not worse.probed(1.05, 1.3)  # a lower one is no help: the target is as near
    assert worse.until == pytest.approx(1 / 0.98)
    assert not worse.probed(1.02, 1.3)
    assert worse.until is None


def test_without_a_target_it_stays() -> None:
    decay = LrDecay(None, 3.0)
    assert decay.until is None
    assert not decay.due(0.0)
    assert not decay.near(0.0)
