"""A role's recorder: both threads write, batches go out, spans are bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from zmqtrain.observe import recorder as module
from zmqtrain.observe.recorder import RunRecorder
from zmqtrain.testing import virtual_time


class Desk:
    """Takes batches like the coordinator."""

    def __init__(self) -> None:
        self.batches: list[list[Mapping[str, Any]]] = []
        self.came = asyncio.Event()

    async def post(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.batches.append(list(events))
        self.came.set()

    @property
    def events(self) -> list[Mapping[str, Any]]:
        return [event for batch in self.batches for event in batch]


async def test_events_of_both_threads_arrive_once() -> None:
    desk = Desk()
    recorder = RunRecorder(desk.post)

    def record(name: str) -> None:
        for step in range(200):
            recorder.event(name, step=step, loss=0.5)

    threads = [threading.Thread(target=record, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await recorder.flush()
    await recorder.flush()
    assert len(desk.batches) == 1
    assert len(desk.events) == 800
    first = next(event for event in desk.events if event["kind"] == "thread 1")
    assert first["step"] == 0
    assert first["values"] == {"loss": 0.5}


async def test_spans_of_the_first_steps_only() -> None:
    desk, now = Desk(), [10.0]
    recorder = RunRecorder(desk.post, trace_steps=2, clock=lambda: now[0])
    for step in range(7, 12):
        with recorder.span("forward", "compute", step=step):
            now[0] += 0.5
    recorder.add_span("push", "send", 10.0, 10.25, step=8, values={"bytes": 4})
    await recorder.flush()
    assert [(span["name"], span["step"], span["seconds"]) for span in desk.events] == [
        ("forward", 7, 0.5),
        ("forward", 8, 0.5),
        ("push", 8, 0.25),
    ]
    assert desk.events[1]["time"] - desk.events[0]["time"] == pytest.approx(0.5)


async def test_spans_of_no_step_end_with_those_of_the_first_steps() -> None:
    desk = Desk()
    recorder = RunRecorder(desk.post, trace_steps=2)
    for step in range(7, 1000):
        recorder.add_span("wait for parts", "wait", 0.0, 1.0)
        recorder.add_span("forward", "compute", 0.0, 1.0, step=step)
    await recorder.flush()
    assert [span["name"] for span in desk.events] == ["wait for parts", "forward"] * 2 + ["wait for parts"]


async def test_a_span_that_raises_is_recorded() -> None:
    desk = Desk()
    recorder = RunRecorder(desk.post)
    with pytest.raises(ValueError, match="wrong"), recorder.span("forward", "compute", step=0):
        raise ValueError("wrong")
    await recorder.flush()
    assert [span["name"] for span in desk.events] == ["forward"]


async def test_no_trace_steps_no_spans() -> None:
    desk = Desk()
    recorder = RunRecorder(desk.post, trace_steps=0)
    with recorder.span("forward", "compute", step=0), recorder.span("other", "wait"):
        pass
    await recorder.flush()
    assert desk.batches == []


async def test_spans_beyond_the_bound_are_counted_and_events_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    desk = Desk()
    recorder = RunRecorder(desk.post)
    for number in range(5):
        recorder.add_span(f"span {number}", "send", 0.0, 1.0, step=0)
    recorder.event("step", step=0)
    await recorder.flush()
    kinds = [event["kind"] for event in desk.events]
    assert kinds == ["span", "span", "span", "step", "dropped"]
    assert desk.events[-1]["values"] == {"spans": 2}


async def test_run_posts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.001)
    desk = Desk()
    recorder = RunRecorder(desk.post)
    posting = asyncio.create_task(recorder.run())
    recorder.event("step", step=0)
    async with asyncio.timeout(5):
        await desk.came.wait()
    posting.cancel()
    await asyncio.wait([posting])
    assert [event["kind"] for event in desk.events] == ["step"]


@pytest.mark.parametrize(("roles", "posts"), [(1, 40), (25, 40), (500, 2)])
@virtual_time()
async def test_many_roles_post_less_often(roles: int, posts: int) -> None:
    """In ten seconds: the launcher has all their posts to take."""
    batches = []

    async def post(events: Sequence[Mapping[str, Any]]) -> None:
        batches.append(len(events))

    recorder = RunRecorder(post, roles=roles)
    posting = asyncio.create_task(recorder.run())
    for step in range(100):
        recorder.event("step", step=step)
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.05)
    posting.cancel()
    await asyncio.wait([posting])
    assert len(batches) == posts
    assert sum(batches) == 100


async def test_a_cancelled_flush_loses_nothing() -> None:
    arrived: list[Mapping[str, Any]] = []
    may_arrive = asyncio.Event()

    async def slowly(events: Sequence[Mapping[str, Any]]) -> None:
        await may_arrive.wait()
        arrived.extend(events)

    recorder = RunRecorder(slowly)
    recorder.event("step", step=0)
    posting = asyncio.create_task(recorder.flush())
    await asyncio.sleep(0)
    posting.cancel()
    await asyncio.wait([posting])
    recorder.event("step", step=1)
    asyncio.get_running_loop().call_later(0.01, may_arrive.set)
    await recorder.flush()
    assert [event["step"] for event in arrived] == [0, 1]
    await recorder.close()


async def test_closing_gives_up_what_is_on_its_way() -> None:
    async def never(events: Sequence[Mapping[str, Any]]) -> None:
        await asyncio.Event().wait()

    recorder = RunRecorder(never)
    recorder.event("step", step=0)
    posting = asyncio.create_task(recorder.flush())
    await asyncio.sleep(0)
    posting.cancel()
    await asyncio.wait([posting])
    await recorder.close()
    assert len(asyncio.all_tasks()) == 1
