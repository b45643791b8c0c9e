"""The trace opens in Perfetto: every span is there once, in the row of its category, and no two in a row overlap partly."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.observe.trace import CATEGORIES, Trace


def span(time: float, seconds: float, category: str = "compute", name: str = "forward") -> dict[str, Any]:
    return {"time": time, "seconds": seconds, "category": category, "name": name, "step": 3, "values": {"bytes": 8}}


def test_rows_are_named_and_times_begin_at_zero() -> None:
    trace = Trace()
    trace.add("worker/1", span(100.5, 0.25, "wait"))
    trace.add("worker/0", span(100.0, 1.0))
    trace.add("server/0", span(100.0, 1.0, "receive"))
    document = json.loads(trace.to_json())
    events = document["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["server/0", "worker/0", "worker/1"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = {processes[event["pid"]]: event for event in events if event["ph"] == "X"}
    assert spans["worker/0"]["ts"] == 0
    assert spans["worker/0"]["dur"] == 1e6
    assert spans["worker/1"]["ts"] == 0.5e6
    assert spans["worker/1"]["args"] == {"step": 3, "bytes": 8}
    assert rows[spans["worker/1"]["pid"], spans["worker/1"]["tid"]] == "wait"
    assert rows[spans["server/0"]["pid"], spans["server/0"]["tid"]] == "receive"


def test_no_spans_give_a_trace_too() -> None:
    assert json.loads(Trace().to_json())["traceEvents"] == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["worker/0", "worker/10", "server/0"]),
            st.sampled_from(CATEGORIES),
            st.integers(0, 50),
            st.integers(0, 20),
        ),
        max_size=30,
    )
)
def test_every_span_is_there_and_none_of_a_row_overlaps_another(spans: list[tuple[str, str, int, int]]) -> None:
    trace = Trace()
    for peer, category, begin, length in spans:
        trace.add(peer, span(float(begin), float(length), category))
    drawn = [event for event in trace.events() if event["ph"] == "X"]
    assert len(drawn) == len(spans)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace.events() if e["name"] == "thread_name"}
    around: dict[tuple[int, int], list[float]] = {}
    for event in sorted(drawn, key=lambda event: (event["ts"], -event["dur"])):
        row = (event["pid"], event["tid"])
        ends = around.setdefault(row, [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or (names[row].startswith("compute") and event["ts"] + event["dur"] <= ends[-1])
        ends.append(event["ts"] + event["dur"])


def test_a_bucket_s_backward_lies_on_the_whole_and_messages_do_not_lie_on_each_other() -> None:
    trace = Trace()
    for each in (
        span(0.0, 4.0, name="backward"),
        span(0.0, 1.0, name="backward of bucket 0"),
        span(1.0, 3.0, name="backward of bucket 1"),
    ):
        trace.add("worker/0", each)
    for _ in range(2):
        trace.add("worker/0", span(0.0, 1.0, "send"))
    rows = [event["tid"] for event in trace.events() if event["ph"] == "X"]
    assert len(rows) == 5
    assert sorted(rows).count(rows[0]) == 3
    assert len(set(rows)) == 3
