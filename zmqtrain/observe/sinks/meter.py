"""From events to figures: what the workers report about a step becomes one row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any

from zmqtrain.observe.sinks.base import Figures
from zmqtrain.observe.summary import metrics_of
from zmqtrain.observe.sums import mean_staleness

#: A step is given out without the workers that are this many steps behind the furthest one,
MOST_BEHIND = 256
#: and so many seconds. (Workers report several times a second, each by itself, and may make thousands of steps meanwhile.)
MOST_LATE_S = 10.0


class Meter:
    """Feed it events (`add`). A step's row is complete when all workers that are in the run have reported it, or when it is
    `MOST_BEHIND` steps and `MOST_LATE_S` old: asynchronous groups may be far apart. What comes later about such a step is left out.

    A worker is in the run until it says itself that it has trained its last step: that it has left is heard before that."""

    def __init__(self) -> None:
        self._workers: set[str] = set()
        self._steps: dict[int, dict[str, Mapping[str, Any]]] = {}  # step -> worker -> its event
        self._order: list[int] = []  # the same steps, as a heap: thousands of them may wait for one worker's report
        self._newest, self._newest_s = 0, 0.0  # the newest step, and the time of its newest report
        self._given = -1  # the newest step that was given out

    def add(self, event: Mapping[str, Any]) -> list[Figures]:
        """Take an event. Returns the rows that it completes."""
        kind, values = event["kind"], event["values"]
        if event["role"] == "worker":
            peer = f"worker/{event['rank']}"
            if kind == "step" and event["step"] > self._given:
                if event["step"] not in self._steps:
                    self._steps[event["step"]] = {}
                    heappush(self._order, event["step"])
                self._steps[event["step"]][peer] = event
                self._newest = max(self._newest, event["step"])
                self._newest_s = max(self._newest_s, event["time"])
            elif kind == "eval":
                metrics = {f"eval/{name.removeprefix('eval_')}": value for name, value in metrics_of(values).items()}
                return [*self._complete(), Figures(event["step"], event["time"], metrics)]
            elif kind == "join":
                self._workers.add(peer)
            elif kind in ("finish", "stopped", "too late", "lost"):
                self._workers.discard(peer)
            else:
                return []
            return self._complete()
        return []

    def rest(self) -> list[Figures]:
        """The rows of steps that some workers have not reported. Call it at the end."""
        rows = [self._row(step) for step in sorted(self._steps)]
        self._steps.clear()
        self._order.clear()
        return rows

    def _complete(self) -> list[Figures]:
        rows = []
        while self._order:
            step = self._order[0]
            if not self._workers <= self._steps[step].keys() and not self._is_old(step):
                break
            rows.append(self._row(heappop(self._order)))
            del self._steps[step]
            self._given = step
        return rows

    def _is_old(self, step: int) -> bool:
        return step <= self._newest - MOST_BEHIND and self._time(step) <= self._newest_s - MOST_LATE_S

    def _time(self, step: int) -> float:
        newest: float = max(event["time"] for event in self._steps[step].values())
        return newest

    def _row(self, step: int) -> Figures:
        return Figures(step, self._time(step), figures_of([event["values"] for event in self._steps[step].values()]))


def figures_of(workers: list[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of a step, from the values that each worker reports: the loss is the mean over samples, everything else over
    workers; ``samples`` and ``samples_per_s`` are sums."""
    rows = [_numbers(values) for values in workers]
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        found[f"train/{name}"] = statistics.fmean(row[name] for row in rows if name in row)
    losses = [(row["loss"], row.get("samples", 0.0)) for row in rows if "loss" in row]
    counted = sum(samples for _, samples in losses)
    if counted:
        found["train/loss"] = sum(loss * samples for loss, samples in losses if samples) / counted
    found["train/samples"] = sum(row.get("samples", 0.0) for row in rows)
    found["train/samples_per_s"] = sum(row.get("samples", 0.0) / row["step_s"] for row in rows if row.get("step_s"))
    if "train/staleness_max" in found:
        found["train/staleness_max"] = max(row["staleness_max"] for row in rows if "staleness_max" in row)
    return found


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """A step's numbers by name. Its duration is called ``step_s``, as in the summary."""
    numbers = {
        "step_s" if name == "seconds" else name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    stale = mean_staleness(values)
    return numbers if stale is None else {**numbers, "staleness": stale}
