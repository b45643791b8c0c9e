"""When the learning rate may fall."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zmqtrain.tune.fall import CLOSE, CLOSER, Fall


@pytest.mark.parametrize(("begin", "until"), [(9.0, CLOSE), (None, CLOSE), (1.2, CLOSER)])
def test_it_is_asked_near_the_target(begin: float | None, until: float) -> None:
    fall = Fall(2.0, None if begin is None else 2 * begin)
    assert fall.until == pytest.approx(2 * until)
    assert fall.due(2 * until - 0.01)
    assert not fall.due(2 * until + 0.01)
    assert fall.near(2 * until + 0.01)
    assert not fall.due(None)


def test_what_a_probe_has_shown_tells_when() -> None:
    fall = Fall(1.0, 9.0)
    assert not fall.hear(1.5, 1.2)
    assert fall.until == pytest.approx(1.25)  # of which it takes a fifth away
    assert fall.hear(1.25, 0.99)
    assert fall.until is None


def test_each_time_nearer_and_never_where_nothing_can_be_gained() -> None:
    fall = Fall(1.0, 9.0)
    asked = [1.5]
    while not fall.hear(asked[-1], 1.001) and fall.until is not None:  # it always seems to be enough the next time
        asked.append(fall.until)
    assert len(asked) <= 10
    assert asked == sorted(asked, reverse=True)
    assert all(later - 1 <= 0.71 * (sooner - 1) for sooner, later in pairwise(asked))
    worse = Fall(1.0, 1.1)
    assert not worse.hear(1.05, 1.3)  # a lower one is no help: the target is as near
    assert worse.until == pytest.approx(1 / 0.98)
    assert not worse.hear(1.02, 1.3)
    assert worse.until is None


def test_without_a_target_it_stays() -> None:
    fall = Fall(None, 3.0)
    assert fall.until is None
    assert not fall.due(0.0)
    assert not fall.near(0.0)
