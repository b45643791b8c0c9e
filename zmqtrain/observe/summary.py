"""``summary.json``: a fold of the run's events."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from zmqtrain.observe.resizing import Resizing
from zmqtrain.observe.spread import Spread
from zmqtrain.observe.sums import SUMS, FieldSums, fields_of

#: So many findings that a worker is slow are kept.
MOST_SLOW = 200


class Summary:
    """Feed it events (`add`); `to_dict` gives the summary so far. Steps are counted per group, samples over all workers.

    It takes the same memory however many steps there are: medians and p90 are exact up to `zmqtrain.observe.spread.MOST_EXACT`
    steps of all workers together, and beyond that right within `zmqtrain.observe.spread.PRECISION`. All else is exact."""

    def __init__(self) -> None:
        self.eval: dict[str, float] = {}
        """The newest value of each evaluation metric."""
        self.samples = 0
        self.losses: dict[int, float] = {}
        """Each worker's newest loss."""
        self._steps: dict[int, int] = {}  # rank -> steps done
        self._seconds, self._exposed, self._data_s = Spread(), Spread(), Spread()
        self._data: dict[str, Any] = {}  # the guarantees about the run's samples
        self._served: dict[str, Counter[int]] = {}  # server -> how often it has applied a gradient of each staleness
        self._seen = _Seen()
        self._fc: dict[str, Mapping[str, Any]] = {}  # FC server -> its own statistics
        self._bytes_sent: dict[str, int] = {}  # by each role's newest process
        self._bytes_before = 0  # by the processes before
        self._spread: float | None = None
        self.newest_checkpoint: int | None = None
        """The step of the newest complete checkpoint on disk."""
        self._checkpoints = 0
        self._not_kept: dict[int, str] = {}  # step -> why its checkpoint is not complete
        self._momentum = _MomentumSeen()
        self._slow: list[dict[str, Any]] = []
        self._resizing = Resizing()
        self._first: int | None = None  # the step at which the first worker began
        self._began: float | None = None
        self._ended: float | None = None

    def add(self, peer: str, event: Mapping[str, Any]) -> None:
        """Take one event, as in ``events.jsonl``."""
        values = event["values"]
        self._resizing.add(event)
        if event["kind"] == "step":
            self._add_step(event["rank"], event["step"], event["time"], values)
        elif event["kind"] == SUMS:
            self._add_sums(event, values)
        elif event["kind"] == "start":
            self._add_start(event["step"], values)
        elif event["kind"] == "eval":
            self.eval.update(metrics_of(values))
        elif event["kind"] == "server":
            self._served[peer] = Counter({int(staleness): count for staleness, count in values["staleness"].items()})
            self._momentum.fitted(peer, values.get("momentum"), values.get("momentum_updates"))
        elif event["kind"] == "momentum":
            if "target" in values:
                self._momentum.stated = dict(values)
            else:
                self._momentum.fitted(peer, values.get("fitted"), values.get("updates"))
        elif event["kind"] == "slow":
            self._add_slow(peer, event["step"], values)
        elif event["kind"] == "fc":
            self._fc[peer] = values
        elif event["kind"] == "checkpoint complete":
            self._checkpoints += 1
            self.newest_checkpoint = max(event["step"], self.newest_checkpoint or 0)
            self._not_kept.pop(event["step"], None)
        elif event["kind"] in ("checkpoint late", "checkpoint failed"):
            self._not_kept[event["step"]] = values["reason"]
        sent = values.get("bytes_sent")
        if isinstance(sent, int):
            before = self._bytes_sent.get(peer, 0)
            self._bytes_before += before if sent < before else 0
            self._bytes_sent[peer] = sent
        spread = values.get("replica_spread")
        if isinstance(spread, int | float):
            self._spread = float(spread)

    def _add_start(self, step: int | None, values: Mapping[str, Any]) -> None:
        if isinstance(values.get("data"), Mapping):
            self._data = dict(values["data"])
        # A worker that joins a run in progress, or begins again, starts later than the others have.
        if step is not None:
            self._first = step if self._first is None else min(self._first, step)

    def _add_step(self, rank: int, step: int | None, time: float, values: Mapping[str, Any]) -> None:
        seconds = float(values.get("seconds", 0.0))
        self._steps[rank] = max(self._steps.get(rank, 0), 1 + (step or 0))
        self.samples += int(values.get("samples", 0))
        self._seconds.add(seconds)
        self._exposed.add(float(values.get("exposed_s", 0.0)))
        if "data_s" in values:
            self._data_s.add(float(values["data_s"]))
        loss = values.get("loss")
        if isinstance(loss, int | float):
            self.losses[rank] = float(loss)
        self._seen.add(values)
        self._lasted(time - seconds, time)

    def _add_sums(self, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Take a line that stands for many events."""
        if values["of"] == "eval":
            self.eval.update(metrics_of(values["last"]))
        if values["of"] != "step":
            return
        rank, fields = event["rank"], fields_of(values)
        self._steps[rank] = max(self._steps.get(rank, 0), 1 + event["step"])
        self.samples += int(fields["samples"].total) if "samples" in fields else 0
        for spread, name in ((self._seconds, "seconds"), (self._exposed, "exposed_s"), (self._data_s, "data_s")):
            for value, times in fields[name].values() if name in fields else ():
                spread.add(value, times)
        loss = values["last"].get("loss")
        if isinstance(loss, int | float):
            self.losses[rank] = float(loss)
        self._seen.add_sums(values, fields)
        self._lasted(values["since"], event["time"])

    def _add_slow(self, peer: str, step: int | None, values: Mapping[str, Any]) -> None:
        if not values["over"] and len(self._slow) < MOST_SLOW:
            told = {name: values[name] for name in ("what", "factor", "since_step")}
            self._slow.append({"peer": peer, **told, "until_step": None})
        for each in self._slow if values["over"] else ():
            if (each["peer"], each["what"], each["until_step"]) == (peer, values["what"], None):
                each["until_step"] = step

    def _lasted(self, began: float, ended: float) -> None:
        self._began = began if self._began is None else min(self._began, began)
        self._ended = ended if self._ended is None else max(self._ended, ended)

    @property
    def steps(self) -> int:
        """The number of steps of the furthest worker."""
        return max(self._steps.values(), default=0)

    @property
    def training_seconds(self) -> float:
        """From the first step's begin to the last step's end."""
        return (self._ended or 0.0) - (self._began or 0.0)

    @property
    def loss(self) -> float | None:
        """Mean of the workers' newest losses."""
        finite = [loss for loss in self.losses.values() if math.isfinite(loss)]
        return statistics.fmean(finite) if finite else None

    def to_dict(self) -> dict[str, Any]:
        """The part of ``summary.json`` that follows from events. What was never measured, as no step was done, is ``None``."""
        seconds = self.training_seconds
        return {
            "steps": self.steps,
            "resumed_at": self._first or None,
            "samples": self.samples,
            "training_seconds": seconds,
            "samples_per_s": self.samples / seconds if seconds > 0 else None,
            "step_s": _spread_of(self._seconds),
            "exposed_communication_s": _spread_of(self._exposed),
            **({"data": self._data} if self._data else {}),
            **({"data_wait_s": _spread_of(self._data_s)} if self._data_s.count else {}),
            "loss": self.loss,
            "eval": dict(self.eval),
            "staleness": self._staleness(),
            **({"fc": self._merged()} if self._fc else {}),
            "checkpoints": {
                "complete": self._checkpoints,
                "newest": self.newest_checkpoint,
                "failed": [{"step": step, "reason": reason} for step, reason in self._not_kept.items()],
            },
            "momentum": self._momentum.to_dict(self._staleness()["mean"]),
            "bytes_sent": self._bytes_before + sum(self._bytes_sent.values()),
            "replica_spread": self._spread,
            "slow": self._slow,
            **({} if (resizing := self._resizing.to_dict()) is None else {"resizing": resizing}),
        }

    def _merged(self) -> dict[str, Any]:
        """The FC server's updates, their staleness, and the share of its time in which it computed."""
        (values,) = self._fc.values()
        staleness = {"mean": values["staleness_mean"], "max": values["staleness_max"]}
        return {"updates": values["updates"], "busy": values["busy"], "staleness": staleness}

    def _staleness(self) -> dict[str, Any]:
        """The staleness that the servers counted or, without servers, the workers saw."""
        counted = sum(self._served.values(), Counter[int]()) or self._seen.histogram
        if not counted and not self._steps:
            return {"mean": None, "max": None, "histogram": {}}
        if not counted:
            return {"mean": self._seen.mean, "max": self._seen.max, "histogram": {}}
        return {
            "mean": sum(staleness * count for staleness, count in counted.items()) / counted.total(),
            "max": max(counted),
            "histogram": {str(staleness): counted[staleness] for staleness in sorted(counted)},
        }


class _Seen:
    """Staleness as workers see it at the end of a step: the mean and the maximum of its reads, or a list of all of them."""

    def __init__(self) -> None:
        self.histogram: Counter[int] = Counter()
        self.max = 0
        self._sum, self._steps = 0.0, 0

    def add(self, values: Mapping[str, Any]) -> None:
        """Take the values of a step event."""
        staleness = values.get("staleness")
        if isinstance(staleness, list):
            self.histogram.update(int(item) for item in staleness)
        elif isinstance(staleness, int | float):
            self._sum, self._steps = self._sum + staleness, self._steps + 1
            self.max = max(self.max, int(values.get("staleness_max") or staleness))

    def add_sums(self, values: Mapping[str, Any], fields: Mapping[str, FieldSums]) -> None:
        """Take the values of a line that stands for many steps."""
        self.histogram.update({int(staleness): count for staleness, count in (values.get("reads") or {}).items()})
        if "staleness" in fields:
            means = fields["staleness"]
            self._sum, self._steps = self._sum + means.total, self._steps + means.count
            self.max = max(self.max, int(fields.get("staleness_max", means).greatest))

    @property
    def mean(self) -> float:
        """The mean over steps."""
        return self._sum / self._steps if self._steps else 0.0


class _MomentumSeen:
    """What worker 0 states about momentum at the start, and what servers fit while training."""

    def __init__(self) -> None:
        self.stated: dict[str, Any] = {}
        self._fits: dict[str, tuple[float, int]] = {}  # server -> newest fit, and of how many updates

    def fitted(self, peer: str, momentum: Any, updates: Any) -> None:
        """Take a server's newest fit."""
        if isinstance(momentum, int | float) and isinstance(updates, int) and updates > 0:
            self._fits[peer] = (float(momentum), updates)

    def to_dict(self, staleness: float | None) -> dict[str, Any] | None:
        """The values for the summary; ``None`` if no servers run the optimizer. ``staleness``: the measured mean, if any."""
        if not self.stated:
            return None
        seen = sum(updates for _, updates in self._fits.values())
        implicit, total = (None, None) if staleness is None else self._measured(staleness)
        return {
            **self.stated,
            "implicit_measured": implicit,
            "total_measured": total,
            "fitted": sum(momentum * updates for momentum, updates in self._fits.values()) / seen if seen else None,
            "fitted_updates": seen,
        }

    def _measured(self, staleness: float) -> tuple[float, float]:
        """The implicit and the total momentum that belong to a mean staleness."""
        implicit = staleness / (1 + staleness)
        explicit, expected = self.stated.get("explicit") or 0.0, 1 / (1 - self.stated.get("implicit", 0.0))
        ahead = bool((self.stated.get("look_ahead") or {}).get("steps")) and bool(self.stated.get("compensated"))
        total = self.stated["total"] ** ((1 + staleness) / expected) if ahead else 1 - (1 - explicit) * (1 - implicit)
        return implicit, total


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in an ``eval`` event: all its numbers except its duration."""
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float) and name != "seconds"}


def _spread_of(values: Spread) -> dict[str, float | None]:
    return {"median": values.median(), "p90": values.quantile(0.9)}
