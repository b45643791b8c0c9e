"""Who is asked for samples when the members of the ring change."""

from __future__ import annotations

from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_plan import RingPlan

MEMBERS = ("a", "b", "c", "d", "e")


def test_who_held_a_sample_is_asked_first_then_those_who_have_copies() -> None:
    ring = Ring.of(20, 5, 2, seed=1)
    plan = RingPlan(ring, MEMBERS)
    step = ring.steps  # a lap has ended: each has handed its part on to the next
    plan.change(step, ("a", "b", "d", "e"))  # c is lost
    here, lost = int(ring.held(step, 1)[0]), int(ring.held(step, 2)[0])
    assert plan.holders(step, "e", [here], late=False) == [("b", [here]), ("a", [here])], "c, the next, is gone; e is who asks"
    assert plan.holders(step, "e", [lost], late=False) == [(peer, [lost]) for peer in "bda"], "its holder is gone"
    assert dict(plan.holders(step, "e", [here, lost], late=False))["b"] == [here, lost]


def test_one_that_comes_late_asks_all_others() -> None:
    plan = RingPlan(Ring.of(20, 5, 2, seed=1), MEMBERS)
    assert plan.holders(0, "b", [3, 4], late=True) == [(peer, [3, 4]) for peer in "acde"]


def test_samples_are_spread_over_a_lap_and_no_batch_is_empty() -> None:
    ring = Ring.of(20, 2, 3, seed=1)
    assert ring.steps == 4
    assert ring.spread([1, 2, 3, 4, 5, 6]) == [[1, 2], [3, 4], [5], [6]]
    assert ring.spread([7, 8]) == [[7], [8], [7], [7]]
