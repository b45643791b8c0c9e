"""Schedules of faults, for runs that begin later than they do."""

from __future__ import annotations

from zmqtrain.run.faults import drop, heal, kill, later, partition, pause, slow


def test_what_is_left_of_a_schedule() -> None:
    over, lasting, to_come = slow("a", 2.0, at=1.0, lasts=2.0), slow("b", 3.0, at=1.0), slow("c", 4.0, at=12.0, lasts=5.0)
    faults = (over, lasting, to_come, pause("a", 4.0, at=8.0), kill("worker/1", at=2.0), drop("worker/0", at=3.0))
    assert later(faults, 0.0) == faults
    assert later(faults, 10.0) == (
        slow("b", 3.0, at=0.0),
        slow("c", 4.0, at=2.0, lasts=5.0),
        pause("a", 2.0, at=0.0),
    )


def test_partitions_are_over_when_they_are_healed_and_steps_are_of_another_run() -> None:
    faults = (partition(["a"], ["b"], at=1.0), heal(at=5.0), kill("worker/0", step=3))
    assert later(faults, 2.0) == (partition(["a"], ["b"], at=0.0), heal(at=3.0))
    assert later(faults, 6.0) == ()
    assert later((*faults, partition(["a"], ["b"], at=5.5)), 6.0) == (partition(["a"], ["b"], at=0.0),)
