"""Lines for many events at a time: what is written one by one, what is summed up, and that figures stay what they were."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from zmqtrain.observe.live import TableRows
from zmqtrain.observe.report.figures import MOST_POINTS, figures_of
from zmqtrain.observe.spread import LINE_PRECISION
from zmqtrain.observe.summary import Summary
from zmqtrain.observe.sums import FIRST, SLOWEST, SUMS, EventSums
from zmqtrain.strict_json import dumps

Line = dict[str, Any]


def event(kind: str, step: int | None, time: float, rank: int | None = 0, role: str = "worker", **values: Any) -> Line:
    return {"time": time, "host": "a", "role": role, "rank": rank, "step": step, "kind": kind, "values": values}


def written(events: list[Line], most: int | None = 5) -> list[Line]:
    """The file's lines, as a reader gets them."""
    sums = EventSums(most)
    lines = []
    for number, each in enumerate(events):
        lines += sums.add(each)
        if number % 7 == 0:
            lines += sums.due()
    return [json.loads(dumps(line)) for line in [*lines, *sums.rest()]]


def past_the_first(rank: int = 0) -> list[Line]:
    return [event("step", 0, 0.0, rank, seconds=0.0) for _ in range(FIRST)]


def kinds_by_second(lines: list[Line]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in lines[FIRST:]:
        found.setdefault(int(line["time"]), []).append(line["kind"])
    return found


def test_few_events_a_second_are_written_as_they_are() -> None:
    events = [*past_the_first(), *(event("step", n, 10 + n / 5, seconds=0.2) for n in range(50))]
    assert written(events) == events


def test_the_first_events_are_written_at_any_rate() -> None:
    events = [event("step", n, n / 1000, seconds=0.001) for n in range(FIRST)]
    assert written(events) == events


def test_many_events_are_a_line_a_second() -> None:
    events = past_the_first()
    events += [event("step", n, 10 + n / 20, seconds=0.05) for n in range(40)]  # two seconds with 20 each
    events += [event("step", 40 + n, 12 + n / 2, seconds=0.5) for n in range(4)]  # two with 2 each
    found = kinds_by_second(written(events))
    assert found == {10: ["step"] * 5 + [SUMS], 11: [SUMS], 12: [SUMS], 13: ["step"] * 2}


def test_a_second_is_written_soon_after_it_is_over() -> None:
    sums = EventSums(0)
    for each in past_the_first():
        assert sums.add(each) == [each]
    assert sums.add(event("step", 1, 10.5)) == sums.due() == []
    assert sums.add(event("step", 1, 11.5, rank=1, role="server")) != []  # somebody else's
    assert sums.due() == []
    sums.add(event("step", 2, 12.0, rank=1, role="server"))
    assert [line["kind"] for line in sums.due()] == [SUMS]
    assert sums.due() == sums.rest() == []


@pytest.mark.parametrize(
    "each",
    [
        event("view", 1, 10.0, members=["worker/0"]),
        event("server", None, 10.0, role="server"),
        event("lost", None, 10.0, rank=None, role="coordinator"),
        event("checkpoint complete", 3, 10.0, rank=None, role="coordinator"),
    ],
    ids=lambda each: each["kind"],
)
def test_what_has_no_sum_is_always_written(each: Line) -> None:
    assert written([each] * (FIRST + 20), most=0) == [each] * (FIRST + 20)


def test_all_events_if_asked_for() -> None:
    events = [event("step", n, 0.0, seconds=0.001) for n in range(3 * FIRST)]
    assert written(events, most=None) == events


def test_a_line_says_what_it_stands_for() -> None:
    events = past_the_first()
    events += [
        event("step", n, 10 + n / 8, loss=float(n), seconds=0.125, compute_s=0.1, exposed_s=0.0, note="x", staleness=[0, n])
        for n in range(4)
    ]
    *_, line = written(events, most=0)
    values = line.pop("values")
    assert line == {"time": 10.375, "host": "a", "role": "worker", "rank": 0, "step": 3, "kind": SUMS}
    assert (values["of"], values["count"], values["since"], values["first_step"]) == ("step", 4, 10.0, 0)
    assert values["last"]["loss"] == 3.0
    assert values["fields"]["loss"] == {"count": 4, "sum": 6.0, "min": 0.0, "max": 3.0}
    assert values["fields"]["seconds"]["buckets"][1] == 4
    assert values["parts"]["other"]["sum"] == pytest.approx(0.1)
    assert values["staleness"] == {"0": 2, "1": 1, "2": 1}
    assert values["reads"] == {"0": 5, "1": 1, "2": 1, "3": 1}


def test_a_loss_that_is_no_number_is_in_no_sum() -> None:
    events = [*past_the_first(), *(event("step", n, 10.0, loss=loss) for n, loss in enumerate((1.0, float("nan"), 3.0)))]
    *_, line = written(events, most=0)
    assert line["values"]["fields"]["loss"] == {"count": 2, "sum": 4.0, "min": 1.0, "max": 3.0}
    assert line["values"]["count"] == 3


def a_run(workers: int = 2, steps: int = 3000) -> list[Line]:
    """A fast run with uneven steps, some very slow."""
    draw = random.Random(3)
    clocks = [100.0] * workers
    events = []
    for step in range(steps):
        for rank in range(workers):
            seconds = 0.02 * draw.lognormvariate(0, 0.2) * (draw.uniform(3, 9) if draw.random() < 0.02 else 1)
            clocks[rank] += seconds
            exposed = 0.3 * seconds * draw.random()
            told: Line = {"loss": 5.0 / (1 + step / 100) + rank, "samples": 8, "seconds": seconds, "exposed_s": exposed}
            told |= {"compute_s": 0.6 * seconds, "data_s": 0.1 * seconds, "staleness": draw.choice([0.0, 1.0, 1.5])}
            events.append(event("step", step, clocks[rank], rank, **told))
            if step % 3 == 0:
                events.append(event("spread", step, clocks[rank], rank, distance=draw.random(), partner="worker/1"))
    return events


def test_the_reports_figures_stay_what_they_were() -> None:
    events = a_run()
    lines = written(events)
    assert len(lines) < 0.3 * len(events)
    exact, summed = figures_of(events), figures_of(lines)
    assert summed["staleness"] == exact["staleness"]
    assert summed["slowest"] == exact["slowest"]
    assert len(summed["slowest"]) == SLOWEST
    for row, other in zip(summed["ranks"], exact["ranks"], strict=True):
        assert row == {name: pytest.approx(value, rel=LINE_PRECISION) if name != "peer" else value for name, value in other.items()}
    for name in ("compute", "exposed", "other"):
        assert total(summed["split"][name]) == pytest.approx(total(exact["split"][name]), rel=0.03)
    assert len(summed["loss"]["mean"]) <= MOST_POINTS
    for step, _, loss in summed["loss"]["mean"]:
        assert loss == pytest.approx(5.0 / (1 + step / 100) + 0.5, rel=0.1), "each step of a second counts with its mean"


def total(points: list[tuple[float, float, float]]) -> float:
    """The area under a curve over steps."""
    return sum((right[0] - left[0]) * (left[2] + right[2]) / 2 for left, right in itertools.pairwise(points))


def test_a_summary_of_the_file_is_the_summary_of_the_events() -> None:
    events = a_run(steps=1000)
    exact, summed = Summary(), Summary()
    for each in events:
        exact.add(f"worker/{each['rank']}", each)
    for line in written(events):
        summed.add(f"worker/{line['rank']}", line)
    one, other = exact.to_dict(), summed.to_dict()
    for name in ("step_s", "exposed_communication_s", "data_wait_s"):
        assert other.pop(name) == pytest.approx(one.pop(name), rel=LINE_PRECISION)
    for name in ("training_seconds", "samples_per_s"):
        assert other.pop(name) == pytest.approx(one.pop(name))
    one["staleness"]["mean"] = pytest.approx(one["staleness"]["mean"])
    assert other == one


def test_the_table_follows_the_file_of_a_fast_run() -> None:
    events = a_run(workers=1, steps=1000)
    table = TableRows({"worker/0": 0})
    for line in written(events):
        table.add(line, line["time"])
    assert table.groups[0].step == 1000
    assert table.groups[0].loss == events[-2]["values"]["loss"]
    assert table.groups[0].rate == pytest.approx(8 * 1000 / (events[-1]["time"] - 100.0), rel=0.5)


def test_a_busy_worker_takes_about_a_kilobyte_a_second() -> None:
    lines = written(a_run(workers=1, steps=4000))[FIRST + 10 :]
    steps = [line for line in lines if line["kind"] == SUMS and line["values"]["of"] == "step"]
    assert sum(len(dumps(line)) for line in steps) / len(steps) < 2000
