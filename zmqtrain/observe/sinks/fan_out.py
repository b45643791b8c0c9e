"""Passes a run's events to its sinks, each in a thread of its own, so that no sink can slow the run down or end it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.observe.sinks.base import RunFacts, Sink
from zmqtrain.observe.sinks.make import make_sinks
from zmqtrain.observe.sinks.meter import Meter

#: The most events that wait for one sink; it misses those that come while it is so far behind.
MOST_WAITING = 20_000
#: The most events that a sink gets at once.
MOST_AT_ONCE = 1000
#: Seconds that all sinks together have for what is left when the run has ended.
END_S = 30.0
#: Seconds for sinks that are about to begin when another one refuses the run.
ABANDONED_S = 5.0


class FanOut:
    """The sinks of one run: `begin`, then `take` for each event, then `end`. `said` gives what the user must know.

    All methods but a sink's own are quick, and belong to one thread (the launcher's)."""

    def __init__(self, names: Sequence[str] = (), options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Raises `UsageError` if there is no such sink, or if its library is missing."""
        self._options = options or {}
        self._sinks = [_Thread(name, sink) for name, sink in make_sinks(names).items()]

    def begin(self, run: RunFacts) -> list[Future[None]]:
        """Start the sinks. Returns a future for each, which has its `UsageError` if it cannot begin."""
        return [sink.start(replace(run, options=self._options.get(sink.name, {}))) for sink in self._sinks]

    def take(self, event: Mapping[str, Any]) -> None:
        """Pass on an event. Never blocks."""
        for sink in self._sinks:
            sink.take(event)

    def said(self) -> str | None:
        """A line for the user that was not given yet; ``None`` if there is none."""
        for sink in self._sinks:
            if sink.said:
                return sink.said.popleft()
        return None

    def end(self, status: str, summary: Mapping[str, Any], *, timeout_s: float = END_S) -> list[str]:
        """Let the sinks finish. Returns lines for the user about what is missing."""
        for sink in self._sinks:
            sink.finish(status, summary)
        for sink in self._sinks:
            timeout_s -= sink.join(timeout_s)
        return [line for sink in self._sinks for line in (*sink.said, *sink.missed())]

    def abandon(self, *, timeout_s: float = ABANDONED_S) -> None:
        """End the sinks of a run that one of them has refused: also those that are about to begin, unless that takes long."""
        wait([sink.begun for sink in self._sinks], timeout_s)
        self.end("failed", {})


class _Thread:
    """One sink and its thread."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self._sink = name, sink
        self.said: deque[str] = deque()
        self._queue: queue.Queue[Mapping[str, Any] | tuple[str, Mapping[str, Any]]] = queue.Queue(MOST_WAITING)
        self.begun: Future[None] = Future()
        self._off = False
        self._dropped = 0
        self._meter = Meter()
        self._thread: threading.Thread | None = None

    def start(self, run: RunFacts) -> Future[None]:
        # A daemon: a sink that hangs must not keep the launcher from ending.
        self._thread = threading.Thread(target=self._main, args=(run,), name=f"zmqtrain-{self.name}", daemon=True)
        self._thread.start()
        return self.begun

    def take(self, event: Mapping[str, Any]) -> None:
        if self._off or self._thread is None:
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self.said.append(f"warning: {self.name} cannot keep up: figures are left out there. Training continues")

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._off or not self._has_begun:
            return
        try:
            self._queue.put((status, summary), timeout=1.0)
        except queue.Full:
            return  # it hangs, which `missed` says

    def join(self, timeout_s: float) -> float:
        """Wait for the thread to end. Returns the seconds that took."""
        if self._thread is None or not self._has_begun:
            return 0.0
        began = time.monotonic()
        self._thread.join(max(0.0, timeout_s))
        return time.monotonic() - began

    @property
    def _has_begun(self) -> bool:
        return self.begun.done() and self.begun.exception() is None

    def missed(self) -> list[str]:
        """Warnings about events that the sink has not got or not written, for the end of the run."""
        if self._thread is not None and self._has_begun and self._thread.is_alive():
            return [f"warning: {self.name} has not finished in time: what it had not written is missing there"]
        if self._dropped:
            return [f"warning: {self.name} could not keep up: it has missed {self._dropped} events"]
        return []

    def _main(self, run: RunFacts) -> None:
        self.begun.set_running_or_notify_cancel()  # who waits may give up, but cannot take it back
        try:
            self._sink.begin(run)
        except ZmqTrainError as error:
            self.begun.set_exception(error)
            return
        except Exception as error:  # noqa: BLE001 - another package's code, whose error prevents the run, with the reason
            reason = f"[observe] to: {self.name} cannot begin: {type(error).__name__}: {error}"
            self.begun.set_exception(UsageError(reason))
            return
        self.begun.set_result(None)
        try:
            while not self._pass_on(self._batch()):
                pass
        except Exception as error:  # noqa: BLE001 - another package's code: the sink is switched off, and the user is told
            self._off = True
            why = str(error).partition("\n")[0]
            self.said.append(
                f"warning: {self.name} has failed, and gets no more figures: {type(error).__name__}: {why}. Training continues"
            )

    def _batch(self) -> list[Mapping[str, Any] | tuple[str, Mapping[str, Any]]]:
        """Wait for an event, and take what is there with it."""
        batch = [self._queue.get()]
        while len(batch) < MOST_AT_ONCE:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _pass_on(self, batch: Sequence[Mapping[str, Any] | tuple[str, Mapping[str, Any]]]) -> bool:
        """Give the sink what has come. Returns whether that was the end."""
        events = [item for item in batch if not isinstance(item, tuple)]
        end = next((item for item in batch if isinstance(item, tuple)), None)
        rows = [row for event in events for row in self._meter.add(event)]
        if end is not None:
            rows += self._meter.rest()
        if events:
            self._sink.events(events)
        if rows:
            self._sink.figures(rows)
        if end is not None:
            self._sink.end(*end)
        return end is not None
