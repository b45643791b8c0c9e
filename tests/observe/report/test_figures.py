"""The figures of a report, from events to plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from zmqtrain.observe.report.figures import MOST_POINTS, MOST_ROWS, figures_of
from zmqtrain.observe.summary import Summary


def event(kind: str, rank: int, step: int | None, time: float, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "role": "worker", "rank": rank, "step": step, "time": time, "values": values}


def test_losses_by_group_and_their_mean() -> None:
    events = [
        event("step", rank, step, 100.0 + step, loss=float(rank + step), seconds=1.0) for step in range(3) for rank in range(4)
    ]
    loss = figures_of(events, group_size=2)["loss"]
    assert loss["groups"] == {"0": [(s, s, s + 0.5) for s in range(3)], "1": [(s, s, s + 2.5) for s in range(3)]}
    assert loss["mean"] == [(s, s, s + 1.5) for s in range(3)]
    assert loss["count"] == 2


def test_a_step_is_split_in_three() -> None:
    events = [
        event("step", 0, 0, 10.0, seconds=1.0, compute_s=0.6, exposed_s=0.3),
        event("step", 1, 0, 10.0, seconds=2.0, compute_s=1.6, exposed_s=0.4),
    ]
    figures = figures_of(events)
    assert [figures["split"][part][0][2] for part in ("compute", "exposed", "other")] == pytest.approx([1.1, 0.35, 0.05])
    assert [row["peer"] for row in figures["ranks"]] == ["worker/0", "worker/1"]
    assert figures["ranks"][0]["other"] == pytest.approx(0.1)


def test_evaluations_spread_staleness_samples_and_traffic() -> None:
    figures = figures_of(
        [
            event("eval", 0, 5, 1.0, accuracy=0.5, seconds=2.0),
            event("spread", 0, 10, 2.0, distance=0.2, partner="worker/1"),
            event("spread", 1, 10, 2.0, distance=0.4, partner="worker/0"),
            event("step", 0, 1, 3.0, seconds=1.0, staleness=2.0),
            event("samples", 1, None, 4.0, held=5, lost=0, lost_samples=[]),
            event("traffic", 0, None, 5.0, sent={"worker/1": 100, "coordinator": 7}),
        ]
    )
    assert figures["eval"] == {"accuracy": [(5, 0.0, 0.5)]}
    assert figures["spread"] == [(10, 1.0, pytest.approx(0.3))]
    assert figures["staleness"] == {"2": 1}
    assert figures["samples"] == {"worker/1": {"held": 5, "lost": 0}}


def test_traffic_adds_up_to_its_total() -> None:
    figures = figures_of(
        [
            event("traffic", 0, None, 5.0, bytes_sent=107, sent={"worker/1": 100, "coordinator": 7}),
            event("traffic", 1, None, 5.0, bytes_sent=53, sent={"worker/0": 50, "coordinator": 3}),
        ]
    )
    traffic = figures["traffic"]
    assert traffic["rows"] == ["worker/0", "worker/1"]
    assert traffic["peers"] == ["worker/0", "worker/1", "coordinator"]
    assert traffic["bytes"] == [[0, 100, 7], [50, 0, 3]]
    assert traffic["total"] == 107 + 53 == sum(map(sum, traffic["bytes"]))


def test_staleness_is_counted_once() -> None:
    """By the servers where there are any, as in the summary: what workers saw is the same reads."""
    events = [event("step", rank, step, 1.0, seconds=1.0, staleness=1.0) for rank in range(2) for step in range(4)]
    assert figures_of(events)["staleness"] == {"1": 8}
    served = [{**event("server", 0, None, 2.0, staleness={"0": 1, "1": 7}), "role": "server"}]
    served += [
        {**event("server", 1, None, 2.0, staleness=staleness), "role": "server"} for staleness in ({"1": 3}, {"1": 6, "2": 2})
    ]
    assert figures_of([*events, *served])["staleness"] == {"0": 1, "1": 13, "2": 2}
    summary = Summary()
    for each in [*events, *served]:
        summary.add(f"{each['role']}/{each['rank']}", each)
    assert summary.to_dict()["staleness"]["histogram"] == {"0": 1, "1": 13, "2": 2}


def test_what_happened_is_told_once() -> None:
    view = {"members": ["worker/0"], "reason": "lost worker/1"}
    events = [event("lost", 1, None, 1.0, reason="killed"), event("view", 0, 7, 2.0, **view), event("view", 2, 7, 2.1, **view)]
    assert [text for _, _, text in figures_of(events)["marks"]] == ["killed", "from step 7 on: 1 members (lost worker/1)"]


def test_slowest_steps_leave_out_the_first() -> None:
    events = [event("step", 0, step, 1.0, seconds=9.0 if step in (0, 3) else 1.0) for step in range(6)]
    assert figures_of(events)["slowest"][0] == {"peer": "worker/0", "step": 3, "seconds": 9.0, "exposed_s": 0.0}


def test_curves_are_thinned_by_means() -> None:
    def losses(steps: int) -> list[Any]:
        curve = figures_of(event("step", 0, n, float(n), loss=float(n), seconds=1.0) for n in range(steps))["loss"]["mean"]
        assert isinstance(curve, list)
        return curve

    thin = losses(10 * MOST_POINTS)
    assert len(thin) == MOST_POINTS
    assert thin[0] == (0.0, 0.0, 4.5)
    assert losses(5) == [(n, n, n) for n in range(5)]


def test_wide_and_long_runs_stay_small() -> None:
    def wide() -> Iterator[dict[str, Any]]:
        for step in range(4):
            for rank in range(4096):
                yield event("step", rank, step, step + rank / 1e6, loss=1.0, seconds=1.0, compute_s=0.5, exposed_s=0.25)
        for rank in range(4096):
            yield event("traffic", rank, None, 9.0, sent={f"worker/{(rank + 1) % 4096}": 1000})

    figures = figures_of(wide())
    assert len(figures["ranks"]) == MOST_ROWS
    assert figures["ranks"][0]["peer"] == "worker/0 to 127"
    assert figures["loss"]["groups"] == {}
    assert len(figures["traffic"]["totals"]) == MOST_ROWS
    assert figures["traffic"]["total"] == 4096 * 1000
    long = figures_of(event("step", 0, step, float(step), loss=1.0, seconds=1.0) for step in range(20_000))
    assert len(json.dumps(figures)) + len(json.dumps(long)) < 500_000


def test_no_events_no_figures() -> None:
    figures = figures_of([])
    assert figures["loss"]["mean"] == []
    assert figures["ranks"] == []
    assert figures["traffic"] == {"rows": [], "peers": [], "bytes": [], "totals": {}, "count": 0, "total": 0}
