"""Which worker is slow, and what of it: decided from events alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from zmqtrain.observe.live import TableRows
from zmqtrain.observe.slowness import Slow, Slowness
from zmqtrain.observe.summary import Summary

Clock = Callable[[int, int], float]


def line(kind: str, rank: int, step: int | None, time: float, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "role": "worker", "rank": rank, "host": f"h{rank}", "step": step, "time": time, "values": values}


def told(
    workers: int = 3,
    steps: int = 120,
    *,
    compute: Clock = lambda _rank, _step: 0.1,
    data: Clock = lambda _rank, _step: 0.0,
    samples: Callable[[int], int] = lambda _rank: 8,
    speed: Callable[[int, int], float] = lambda _source, _target: 1e8,
) -> list[Slow]:
    """What is found in a run whose workers wait for each other in every step, and send each other 10 MB every 20 steps."""
    slowness = Slowness()
    found: list[Slow] = []
    time, sent = 0.0, 0
    for step in range(steps):
        taken = [compute(rank, step) + data(rank, step) for rank in range(workers)]
        time += max(taken) + 0.02
        for rank in range(workers):
            values = {"compute_s": compute(rank, step), "data_s": data(rank, step), "seconds": max(taken) + 0.02}
            values |= {"exposed_s": max(taken) - taken[rank] + 0.02, "samples": samples(rank)}
            found += slowness.add(f"worker/{rank}", line("step", rank, step, time, values))
        if step % 10 == 9:
            sent += 10_000_000
            for rank in range(workers):
                links = {f"worker/{to}": [sent, sent / speed(rank, to)] for to in range(workers) if to != rank}
                found += slowness.add(f"worker/{rank}", line("links", rank, None, time, {"sent": links}))
    return found


def test_even_workers_are_not_slow() -> None:
    assert told() == []


def test_a_slow_device_is_named_and_nobody_who_waits_for_it() -> None:
    (slow,) = told(compute=lambda rank, _: 0.3 if rank == 1 else 0.1)
    assert (slow.peer, slow.what, slow.over) == ("worker/1", "device", False)
    assert slow.factor == pytest.approx(3.0)
    assert slow.reason == "worker/1 is slow: its device computes 3.0 times as long as the others', since step 10"


def test_it_is_named_from_the_step_on_at_which_it_became_slow() -> None:
    (slow,) = told(steps=200, compute=lambda rank, step: 0.3 if rank == 2 and step >= 100 else 0.1)
    assert 90 <= slow.since_step <= 110


def test_one_that_is_fast_again_is_slow_no_longer() -> None:
    first, last = told(steps=300, compute=lambda rank, step: 0.3 if rank == 1 and step < 150 else 0.1)
    assert (first.over, last.over) == (False, True)
    assert "worker/1 is no longer slow" in last.reason


def test_a_slow_loader_is_not_a_slow_device() -> None:
    (slow,) = told(data=lambda rank, _: 0.2 if rank == 0 else 0.001)
    assert (slow.peer, slow.what) == ("worker/0", "loader")
    assert slow.factor == pytest.approx(3.0, rel=0.05)


def test_a_wait_that_is_nothing_beside_the_step_is_no_slow_loader() -> None:
    assert told(data=lambda rank, _: 0.005 if rank == 0 else 0.0001) == []


def test_a_slow_link_is_its_own_and_not_its_neighbours() -> None:
    """What goes to worker/1 and what comes from it is slow; the others reach each other well."""
    (slow,) = told(workers=4, speed=lambda source, target: 2e7 if 1 in (source, target) else 1e8)
    assert (slow.peer, slow.what) == ("worker/1", "link")
    assert slow.factor == pytest.approx(5.0)


def test_of_two_workers_nobody_knows_whose_link_is_slow() -> None:
    assert told(workers=2, speed=lambda _source, _target: 1e6) == []


def test_uneven_parts_of_a_batch_are_not_slowness() -> None:
    """A worker with three times the samples computes for longer, and one with few samples computes each for longer."""
    assert told(compute=lambda rank, _: (0.3, 0.1, 0.1)[rank], samples=lambda rank: (24, 8, 8)[rank]) == []
    assert told(compute=lambda rank, _: (0.1, 0.1, 0.03)[rank], samples=lambda rank: (8, 8, 1)[rank]) == []


@pytest.mark.parametrize("seed", range(3))
def test_times_that_vary_from_step_to_step_are_not_slowness(seed: int) -> None:
    draw = random.Random(seed)
    times = [[draw.expovariate(10.0) for _ in range(4)] for _ in range(400)]
    assert told(workers=4, steps=400, compute=lambda rank, step: times[step][rank]) == []


def test_a_few_slow_steps_pass_by() -> None:
    assert told(compute=lambda rank, step: 0.5 if rank == 1 and 50 <= step < 60 else 0.1) == []


def test_a_worker_that_is_lost_is_compared_with_nobody() -> None:
    slowness = Slowness()
    for step in range(40):
        for rank in range(2):
            slowness.add(f"worker/{rank}", line("step", rank, step, step / 10, {"compute_s": 0.1 * (1 + rank), "seconds": 0.3}))
    slowness.add("worker/0", line("lost", 0, None, 4.0, {}))
    later = [line("step", 1, step, step / 10, {"compute_s": 0.2, "seconds": 0.3}) for step in range(40, 120)]
    assert [found for each in later for found in slowness.add("worker/1", each)] == []


def test_the_table_and_the_summary_name_it() -> None:
    table, summary = TableRows({"worker/1": 0}), Summary()
    for slow in told(steps=300, compute=lambda rank, step: 0.3 if rank == 1 and step < 150 else 0.1):
        event = line("slow", 1, slow.since_step + 40, 1.0, slow.values())
        table.add(event, 1.0)
        summary.add("worker/1", event)
        assert ("slow: worker/1's device 3.0 times" in table.line()) != slow.over
    (row,) = summary.to_dict()["slow"]
    assert (row["peer"], row["what"], row["since_step"]) == ("worker/1", "device", 10)
    assert row["until_step"] is not None
