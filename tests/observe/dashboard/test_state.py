"""What the page shows of a run, from its events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zmqtrain.observe.dashboard.state import MOST_FEED, RunState
from zmqtrain.observe.sums import FIRST, SUMS, EventSums


def event(kind: str, rank: int | None, step: int | None, time: float, role: str = "worker", **values: Any) -> dict[str, Any]:
    return {"time": time, "host": f"h{rank}", "role": role, "rank": rank, "step": step, "kind": kind, "values": values}


def state_of(*events: dict[str, Any], group_size: int = 1) -> dict[str, Any]:
    state = RunState(group_size=group_size)
    for each in events:
        state.add(each)
    value: dict[str, Any] = json.loads(json.dumps(state.to_dict()))
    return value


def step(rank: int, number: int, compute: float = 0.1, **values: Any) -> dict[str, Any]:
    return event("step", rank, number, 100.0 + number, seconds=0.5, compute_s=compute, exposed_s=0.2, samples=4, **values)


def test_curves_of_losses_groups_and_parts_of_steps() -> None:
    state = state_of(*(step(rank, 0, loss=float(rank), lr=0.1) for rank in range(4)), group_size=2)
    assert state["loss"]["value"] == [1.5]
    assert {group: curve["value"] for group, curve in state["group_loss"].items()} == {"0": [0.5], "1": [2.5]}
    assert state["lr"]["value"] == [0.1]
    assert {name: curve["value"] for name, curve in state["split"].items()} == {"compute": [0.1], "exposed": [0.2], "other": [0.2]}
    assert state["workers"][3]["group"] == 1
    assert state["workers"][3]["samples_per_s"] == 8.0


def test_lines_that_stand_for_many_steps() -> None:
    sums = EventSums(0)
    for number in range(FIRST + 10):
        values = {"loss": float(number), "seconds": 0.5, "compute_s": 0.1, "exposed_s": 0.2, "samples": 4, "staleness": 1.0}
        sums.add(event("step", 0, number, 100.0 + number / 1000, **values))
    lines = [line for line in sums.rest() if line["kind"] == SUMS]
    assert [line["values"]["count"] for line in lines] == [10], "the first have lines of their own"
    state = state_of(*lines)
    assert (state["loss"]["step"], state["loss"]["value"]) == ([FIRST + 4.5], [FIRST + 4.5])
    assert {name: curve["value"] for name, curve in state["split"].items()} == {"compute": [0.1], "exposed": [0.2], "other": [0.2]}
    (worker,) = state["workers"]
    assert (worker["step"], worker["loss"]) == (FIRST + 9, FIRST + 9.0)
    assert (worker["means"]["compute"], worker["means"]["samples"]) == (0.1, 4.0)
    assert state["staleness"] == {"counts": [[1, 10]], "by": "workers", "mean": 1.0}
    assert (state["stale"]["step"], state["stale"]["value"]) == ([FIRST + 4.5], [1.0])


def test_staleness_over_time_by_group() -> None:
    state = state_of(*(step(rank, 0, staleness=[rank, rank + 1]) for rank in range(2)), step(1, 1, staleness=2.0))
    assert (state["stale"]["step"], state["stale"]["value"]) == ([0, 1], [1.0, 2.0])
    assert {group: curve["value"] for group, curve in state["group_stale"].items()} == {"0": [0.5], "1": [1.5, 2.0]}
    assert state_of(step(0, 0))["stale"]["value"] == []


def test_the_load_of_servers() -> None:
    values = {"seconds": 2.0, "messages": 10, "bytes": 4000, "busy": 0.25, "waiting": 0.5, "waiting_most": 3}
    state = state_of(
        event("load", 0, None, 2.0, role="server", **{**values, "busy": 1.0}), event("load", 0, None, 4.0, role="server", **values)
    )
    (server,) = state["servers"]
    assert (server["peer"], server["host"], server["busy"], server["bytes_per_s"]) == ("server/0", "h0", 0.25, 2000.0)
    assert state["members"] == []


def test_the_figures_of_all_workers() -> None:
    slow = {"what": "link", "factor": 2.5, "over": False, "reason": "its link"}
    state = state_of(event("join", 0, None, 99.0), step(0, 0), step(1, 0), step(1, 20), event("slow", 0, 20, 120.0, **slow))
    assert (state["done"], state["planned"], state["samples_per_s"]) == ([1, 21], None, 16.0)
    assert state["shares"] == pytest.approx({"compute": 0.2, "exposed": 0.4, "other": 0.4})
    assert [(worker["health"], worker["quiet_s"]) for worker in state["workers"]] == [("in the run, slow", 20.0), ("", None)]
    assert [(each["peer"], each["what"], each["reason"]) for each in state["slow"]] == [("worker/0", "link", "its link")]


def test_members_come_and_go() -> None:
    state = state_of(
        event("join", 0, None, 1.0, reason="worker/0 joined"),
        event("join", 1, None, 1.0, reason="worker/1 joined"),
        event("lost", 1, None, 2.0, reason="no heartbeat for 30 s"),
        event("exit", 1, None, 3.0, reason="worker/1 exited with code -9"),
        {**event("leave", None, None, 4.0, role="agent", reason="agent/a left"), "values": {"peer": "agent/a", "reason": "left"}},
    )
    assert [(member["peer"], member["state"], member["reason"]) for member in state["members"]] == [
        ("worker/0", "there", ""),
        ("worker/1", "lost", "no heartbeat for 30 s"),
        ("agent/a", "left", ""),
    ]


def test_servers_staleness_goes_before_the_workers_and_traffic_is_a_matrix() -> None:
    state = state_of(
        step(0, 0, staleness=3.0),
        event("server", 0, None, 5.0, role="server", staleness={"0": 2, "1": 1}),
        event("links", 0, None, 5.0, sent={"server/0": [4, 0.1]}),
        event("links", 1, None, 5.0, sent={"server/0": [3, 0.1]}),
        event("traffic", 0, None, 6.0, sent={"server/0": 10, "coordinator": 1}),
    )
    assert state["staleness"] == {"counts": [[0, 2], [1, 1]], "by": "servers", "mean": 1 / 3}
    assert state["traffic"] == {
        "rows": ["worker/0", "worker/1"], "peers": ["server/0", "coordinator"], "bytes": [[10, 1], [3, 0]],
    }  # fmt: skip


def test_what_was_sent_to_a_member_that_is_lost_stays_in_the_traffic() -> None:
    state = state_of(
        event("links", 0, None, 5.0, sent={"worker/1": [40, 0.1], "worker/2": [30, 0.1]}),
        event("lost", 2, None, 6.0, reason="it was killed"),
        event("links", 0, None, 7.0, sent={"worker/1": [50, 0.1]}),
    )
    assert state["traffic"] == {"rows": ["worker/0"], "peers": ["worker/1", "worker/2"], "bytes": [[50, 30]]}


def test_the_feed_is_bounded_and_goes_on_where_a_reader_was() -> None:
    state = RunState()
    for number in range(MOST_FEED + 5):
        state.add(event("note", None, None, float(number), role="coordinator", text=f"line {number}"))
    assert len(state.feed()) == MOST_FEED
    assert [item["text"] for item in state.feed(after=MOST_FEED + 3)] == [f"line {MOST_FEED + 3}", f"line {MOST_FEED + 4}"]
    assert state.feed(after=MOST_FEED + 5) == []


def test_numbers_that_json_does_not_have_are_left_out_of_curves() -> None:
    state = state_of(step(0, 0, loss="NaN"), step(0, 1, loss=1.0))
    assert (state["loss"]["step"], state["workers"][0]["loss"]) == ([1], 1.0)


def test_a_failures_reason_does_not_repeat_whose_it_is() -> None:
    (member,) = state_of(event("failed", 0, None, 1.0, reason="worker/0 failed: no memory"))["members"]
    assert (member["state"], member["reason"]) == ("failed", "no memory")


def test_what_an_event_says_is_for_people() -> None:
    state = RunState()
    state.add(event("start", 0, 0, 1.0, steps=100000, restored=False, elastic=True, data={"source": "dataset"}, lr=0.12345678))
    state.add(event("built", 0, 1, 2.0, seconds=0.03624588, eval_loss=0.1842333, wait_s=0.5, samples_per_s=1234))
    assert [item["text"] for item in state.feed()] == [
        "steps 100,000, elastic, lr 0.1235",
        "took 36.2 ms, eval loss 0.1842, wait 500 ms, samples per s 1,234",
    ]


def test_hosts_are_in_the_order_of_their_names() -> None:
    hosts = ("n1", "n10", "n9", "n2")
    joins = [event("join", rank, None, 0.0, peer=f"worker/{rank}") | {"host": host} for rank, host in enumerate(hosts)]
    assert [place["host"] for place in state_of(*joins)["places"]] == ["n1", "n2", "n9", "n10"]
