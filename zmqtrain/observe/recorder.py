"""A role's recorder: takes events and spans from both threads, and posts them in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from zmqtrain.events import EventValue
from zmqtrain.wire.message import pack_value
from zmqtrain.world import wall_s

#: Takes a batch of events; returns when they have arrived.
Post: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], Awaitable[None]]

#: Takes audit events, as `zmqtrain.events.Recorder.audit` does: the kind, and the values.
AuditEvents: TypeAlias = Callable[[str, Mapping[str, object]], None]

#: The bytes sent to each peer, and the seconds that took (`zmqtrain.net.endpoint.Endpoint.speeds`).
Speeds: TypeAlias = Callable[[], dict[str, tuple[int, float]]]

#: Seconds between batches: long enough to cost little, short enough for a live table.
INTERVAL_S = 0.25
#: The most posts of all roles in a second: each takes the launcher about a tenth of a millisecond.
MOST_POSTS = 100
#: Seconds between events about the speed of links, and the most links of one.
LINKS_S, MOST_LINKS = 2.0, 16
#: The most events that may wait to be posted. Beyond it spans, which only serve display, are dropped and counted.
MOST_WAITING = 50_000
#: While the launcher is away: beyond this many events their size is checked, and beyond this many bytes they are dropped.
FEW_WAITING, MOST_HELD = 2000, 16 << 20


class RunRecorder:
    """Implements `zmqtrain.events.Recorder`. Make it on the loop's thread; ``run()`` it as a task, and ``flush()`` at the end.

    Times in events are seconds since the epoch: the loop's clock plus an offset that is read once, so that they never go back.
    Spans are kept for the first ``trace_steps`` steps that this recorder sees; those of no step as long as these last.
    """

    def __init__(
        self,
        post: Post,
        *,
        trace_steps: int = 20,
        clock: Callable[[], float] | None = None,
        audit: AuditEvents | None = None,
        speeds: Speeds | None = None,
        roles: int = 1,
    ) -> None:
        """``speeds``: of this role's links, for an event ``links`` every `LINKS_S` seconds. ``roles``: how many post to the same
        process."""
        self._post, self._speeds = post, speeds
        self._interval_s = max(INTERVAL_S, roles / MOST_POSTS)
        self._audit = audit
        self._clock = clock or asyncio.get_running_loop().time
        self._offset = wall_s() - self._clock()
        self._trace_steps = trace_steps
        self._first_step: int | None = None
        self._newest_step = 0
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._dropped: Counter[str] = Counter()
        self._held = 0  # bytes of the events beyond the first `FEW_WAITING`
        self._posting: asyncio.Future[None] | None = None  # the batch that is being posted

    def event(self, kind: str, /, *, step: int | None = None, **values: EventValue) -> None:
        self._add({"kind": kind, "time": self._clock() + self._offset, "step": step, "values": values})

    def span(self, name: str, category: str, /, *, step: int | None = None) -> AbstractContextManager[object]:
        return self._measure(name, category, step)

    @contextmanager
    def _measure(self, name: str, category: str, step: int | None) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add_span(name, category, start, self._clock(), step=step)

    def add_span(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        *,
        step: int | None = None,
        values: Mapping[str, EventValue] | None = None,
    ) -> None:
        if step is not None:
            self._newest_step = max(self._newest_step, step)
            if self._first_step is None:
                self._first_step = step
        since = (self._newest_step if step is None else step) - (self._first_step or 0)
        if not 0 <= since < self._trace_steps:
            return
        span = {"kind": "span", "time": start_s + self._offset, "step": step, "name": name, "category": category}
        self._add({**span, "seconds": end_s - start_s, "values": dict(values or {})})

    def audit(self, what: str, /, **values: object) -> None:
        if self._audit is not None:
            self._audit(what, values)

    async def run(self) -> None:
        """Post new events again and again, until cancelled: every `INTERVAL_S` seconds, or less often in a large run."""
        told: dict[str, tuple[int, float]] = {}
        due = self._clock() + LINKS_S
        while True:
            await asyncio.sleep(self._interval_s)
            if self._speeds is not None and self._clock() >= due:
                now, due = self._speeds(), self._clock() + LINKS_S
                if now != told:
                    told = now
                    most = sorted(now, key=lambda peer: -now[peer][0])[:MOST_LINKS]
                    self.event("links", sent={peer: list(now[peer]) for peer in most})
            await self.flush()

    async def flush(self) -> None:
        """Post new events now. Cancelling it loses nothing: a batch that is being posted continues, and the next call waits for
        it."""
        while self._posting is not None:
            posting = self._posting
            await asyncio.wait({posting})
            self._posted(posting)
        with self._lock:
            batch, self._waiting = self._waiting, []
            dropped, self._dropped = self._dropped, Counter()
            self._held = 0
        if dropped:
            now = self._clock() + self._offset
            batch.append({"kind": "dropped", "time": now, "step": None, "values": dict(dropped)})
        if batch:
            self._posting = posting = asyncio.ensure_future(self._post(batch))
            await asyncio.shield(posting)
            self._posted(posting)

    async def close(self) -> None:
        """Give up events that have not arrived."""
        if self._posting is not None:
            self._posting.cancel()
            await asyncio.wait({self._posting})
            if not self._posting.cancelled():
                self._posting.exception()

    def _posted(self, posting: asyncio.Future[None]) -> None:
        if self._posting is posting:
            self._posting = None
            posting.result()  # the first caller that waits raises the error

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            crowded = len(self._waiting) >= MOST_WAITING
            if crowded and event["kind"] == "span":
                self._dropped["spans"] += 1
                return
            if len(self._waiting) >= FEW_WAITING:  # nobody takes them at the moment
                nbytes = len(pack_value(event))
                if self._held + nbytes > MOST_HELD:
                    self._dropped["events"] += 1
                    return
                self._held += nbytes
            self._waiting.append(event)
