"""What workers report about a step becomes one row of figures."""

from __future__ import annotations

from typing import Any

from zmqtrain.observe.sinks.meter import MOST_BEHIND, Meter


def event(kind: str, rank: int, step: int | None = None, **values: Any) -> dict[str, Any]:
    return {"time": 100.0 + (step or 0), "host": "a", "role": "worker", "rank": rank, "step": step, "kind": kind, "values": values}


def joined(workers: int) -> Meter:
    meter = Meter()
    for rank in range(workers):
        assert not meter.add(event("join", rank))
    return meter


def test_a_step_is_complete_when_all_workers_have_reported_it() -> None:
    meter = joined(2)
    assert not meter.add(event("step", 0, 0, loss=1.0, samples=1, seconds=0.5, staleness=[0, 2]))
    (row,) = meter.add(event("step", 1, 0, loss=2.0, samples=3, seconds=1.0, staleness=None, epoch=0))
    assert row.step == 0
    assert row.values["train/loss"] == 1.75  # the mean over samples
    assert row.values["train/samples"] == 4
    assert row.values["train/samples_per_s"] == 1 / 0.5 + 3 / 1.0
    assert row.values["train/step_s"] == 0.75
    assert row.values["train/staleness"] == 1.0


def test_rows_are_in_order_of_steps_and_groups_far_behind_are_left_out() -> None:
    meter = joined(2)
    rows = [row for step in range(MOST_BEHIND + 2) for row in meter.add(event("step", 0, step, loss=1.0))]
    assert [row.step for row in rows] == [0, 1]
    assert not meter.add(event("step", 1, 1, loss=9.0)), "it was given out"
    (row,) = meter.add(event("step", 1, 2, loss=3.0))
    assert (row.step, row.values["train/loss"]) == (2, 2.0)
    assert [row.step for row in meter.rest()] == list(range(3, MOST_BEHIND + 2))


def test_lost_workers_are_not_waited_for() -> None:
    meter = joined(2)
    assert not meter.add(event("step", 0, 0, loss=1.0))
    (row,) = meter.add(event("lost", 1))
    assert row.step == 0


def test_a_worker_that_has_left_has_its_last_reports_waited_for() -> None:
    meter = joined(3)
    assert not meter.add(event("step", 0, 0, loss=1.0, samples=2))
    for rank in range(3):
        assert not meter.add(event("leave", rank))
    assert not meter.add(event("finish", 0, 1))
    assert not meter.add(event("step", 2, 0, loss=4.0, samples=1))
    assert not meter.add(event("finish", 2, 1))
    (row,) = meter.add(event("step", 1, 0, loss=1.0, samples=1))
    assert (row.values["train/loss"], row.values["train/samples"]) == (1.75, 4)


def test_a_worker_whose_report_is_not_there_yet_is_not_behind() -> None:
    meter = joined(2)
    quick = [{**event("step", 0, step, loss=1.0), "time": 100 + step / 1000} for step in range(1000)]
    assert not [row for each in quick for row in meter.add(each)]
    rows = [row for each in quick for row in meter.add({**each, "rank": 1, "values": {"loss": 3.0}})]
    assert [row.step for row in rows] == list(range(1000))
    assert {row.values["train/loss"] for row in rows} == {2.0}


def test_evaluations_pass_at_once() -> None:
    (row,) = joined(2).add(event("eval", 0, 5, seconds=1.0, eval_accuracy=0.5))
    assert (row.step, row.values) == (5, {"eval/accuracy": 0.5})
