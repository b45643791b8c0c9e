"""How far a run is, and what is left."""

from __future__ import annotations

from typing import Any

from zmqtrain.observe.progress import Progress


def event(kind: str, rank: int, step: int | None = None, **values: Any) -> dict[str, Any]:
    return {"role": "worker", "rank": rank, "step": step, "kind": kind, "values": values}


def progress_of(*, steps: int | None = 100) -> Progress:
    """Two workers, of which the second does half as many steps in a second."""
    progress = Progress()
    for rank in range(2):
        progress.add(event("start", rank, 0, steps=steps), 0.0)
    for second in range(1, 11):
        progress.add(event("step", 0, 4 * second - 1), float(second))
        progress.add(event("sums", 1, 2 * second - 1, of="step"), float(second))
    return progress


def test_the_time_left_is_that_of_the_last_worker_to_finish() -> None:
    assert progress_of().to_dict() == {"planned": 100, "done": (20, 40), "left_s": 40.0}


def test_without_a_number_of_steps_nobody_knows_the_time_left() -> None:
    assert progress_of(steps=None).to_dict() == {"planned": None, "done": (20, 40), "left_s": None}


def test_a_lost_worker_is_not_waited_for_and_one_that_comes_back_begins_anew() -> None:
    progress = progress_of()
    progress.add(event("lost", 1), 11.0)
    progress.add(event("exit", 1), 11.0)
    assert (progress.done(), progress.left_s()) == ((40, 40), 15.0)
    progress.add(event("join", 1), 12.0)
    progress.add(event("step", 1, 79), 13.0)
    assert (progress.done(), progress.left_s()) == ((40, 80), None), "its pace is not known yet"


def test_at_the_end_those_count_who_were_there() -> None:
    progress = progress_of(steps=40)
    progress.add(event("lost", 1), 11.0)
    progress.add(event("leave", 0), 11.0)
    assert (progress.done(), progress.left_s()) == ((40, 40), 0.0)


def test_steps_that_arrive_together_say_nothing_of_the_pace() -> None:
    progress = Progress()
    progress.add(event("start", 0, 0, steps=10), 0.0)
    for step in range(3):
        progress.add(event("step", 0, step), 5.0)
    assert progress.left_s() is None
    progress.add(event("step", 0, 3), 7.0)
    assert progress.left_s() == 12.0
