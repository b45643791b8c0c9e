"""Bounds ``events.jsonl``: where a role has many events of a kind in a second, one line with their sums takes their place.

Sans-IO: events come with their time. Written for each kind of event of a role:

* the first `FIRST` events, one by one;
* after them up to ``most`` events in each second (of the event's time), one by one;
* the others of that second as one line of kind `SUMS`. After a second with more than ``most`` events, all of the next second are
  summed up.

Events without a step, and of the kinds `ONE_BY_ONE`, are rare or say something that has no sum: they are always written.
``docs/events.md`` describes the line.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqtrain.observe.spread import LINE_PRECISION, Buckets

Line: TypeAlias = dict[str, Any]

#: The kind of a line that stands for many events.
SUMS = "sums"
#: So many events of each kind of a role are written as they are, at whatever rate they come: all of a short run.
FIRST = 200
#: Kinds that are never summed up.
ONE_BY_ONE = frozenset(
    ("start", "view", "parts", "warning", "slow", "stopped", "finish", "left whole", "made whole", "part of a checkpoint failed")
)
#: The values of which a line also tells the distribution, for medians.
TIMED = frozenset(("seconds", "exposed_s", "data_s"))
#: The roles whose events are summed up; the coordinator's and the agents' are about the run.
ROLES = frozenset(("worker", "server", "fc"))
#: So many of a role's slowest steps can be found in its lines.
SLOWEST = 12
#: A second's line is written as soon as some event is this much younger than the second's end.
LATE_S = 1.0


def parts_of(values: Mapping[str, Any]) -> tuple[float, float, float]:
    """A step's seconds, divided into computing, waiting for the network, and the rest."""
    seconds, exposed = float(values.get("seconds") or 0.0), float(values.get("exposed_s") or 0.0)
    compute = min(float(values.get("compute_s") or max(0.0, seconds - exposed)), seconds)
    return compute, exposed, max(0.0, seconds - compute - exposed)


def rounded_staleness(values: Mapping[str, Any]) -> int | None:
    """The mean staleness of a step's reads as a whole number, by which steps are counted; ``None`` if there is none."""
    mean = mean_staleness(values)
    return None if mean is None else round(mean)


def mean_staleness(values: Mapping[str, Any]) -> float | None:
    """The mean staleness of a step's reads, in any of the forms of its event; ``None`` if there is none."""
    staleness = values.get("staleness")
    if isinstance(staleness, list):
        return sum(staleness) / len(staleness) if staleness else None
    return float(staleness) if isinstance(staleness, int | float) else None


class EventSums:
    """Decides what is written: `add` each event, and write what it and `due` return; at the end `rest`."""

    def __init__(self, most: int | None) -> None:
        """``most``: events of a kind and role in a second that are written one by one; ``None``: all."""
        self._most = most
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._newest = -math.inf
        self._looked = -math.inf  # the second of `_newest` at the previous `due`

    def add(self, line: Line) -> list[Line]:
        """Take an event, as it would be written. Returns the lines to write now."""
        if self._most is None or not _can_be_summed(line):
            return [line]
        self._newest = max(self._newest, line["time"])
        kind = self._kinds.setdefault((line["role"], line["rank"], line["kind"]), _Kind(self._most))
        return kind.add(line)

    def due(self) -> list[Line]:
        """The lines of seconds that are over."""
        if not math.isfinite(self._newest) or self._newest < self._looked + 1:
            return []
        self._looked = math.floor(self._newest)
        return [line for kind in self._kinds.values() for line in kind.end(before=self._newest - LATE_S)]

    def rest(self) -> list[Line]:
        """All lines that are left."""
        return [line for kind in self._kinds.values() for line in kind.end(before=math.inf)]


def _can_be_summed(line: Mapping[str, Any]) -> bool:
    return (
        line["kind"] not in ONE_BY_ONE
        and line["role"] in ROLES
        and line["rank"] is not None
        and isinstance(line["step"], int)
        and math.isfinite(line["time"])
    )


class _Kind:
    """The events of one kind of one role."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen = 0  # in all, up to `FIRST`
        self._second: int | None = None
        self._in_second = 0
        self._busy = False  # the previous second had more than `most`
        self._sum: _Sum | None = None
        self._slowest: list[float] = []  # a heap of the seconds of its slowest steps

    def add(self, line: Line) -> list[Line]:
        second, ended = math.floor(line["time"]), []
        if second != self._second:
            ended = self._written()
            self._busy = self._second == second - 1 and self._in_second > self._most
            self._second, self._in_second = second, 0
        slow = line["kind"] == "step" and self._is_among_slowest(float(line["values"].get("seconds") or 0.0))
        self._in_second += 1
        if self._seen < FIRST:
            self._seen += 1
            return [*ended, line]
        if not self._busy and self._in_second <= self._most:
            return [*ended, line]
        if self._sum is None:
            self._sum = _Sum(line["kind"], line["time"], line["step"])
        self._sum.add(line, slow=slow)
        return ended

    def end(self, *, before: float) -> list[Line]:
        """The line of a second that ended before this time, if there is one."""
        return self._written() if self._second is not None and self._second + 1 <= before else []

    def _written(self) -> list[Line]:
        ended, self._sum = self._sum, None
        return [] if ended is None else [ended.line()]

    def _is_among_slowest(self, seconds: float) -> bool:
        """Whether it is one of the slowest steps up to now: all that are among the slowest in the end are."""
        if len(self._slowest) <= SLOWEST:  # one more, since nobody shows the first step
            heapq.heappush(self._slowest, seconds)
            return True
        if seconds <= self._slowest[0]:
            return False
        heapq.heapreplace(self._slowest, seconds)
        return True


def _flat(counts: Mapping[int, int]) -> list[int]:
    """Buckets, each as its distance from the previous one (the first from 0), and their counts, alternating: short in JSON."""
    flat, before = [], 0
    for bucket in sorted(counts):
        flat += [bucket - before, counts[bucket]]
        before = bucket
    return flat


@dataclass(slots=True)
class _Field:
    """The values of one name: how many, their sum, the least and the greatest; of durations also how they are distributed."""

    count: int = 0
    total: float = 0
    least: float = math.inf
    greatest: float = -math.inf
    buckets: Buckets | None = None

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        if self.buckets is not None:
            self.buckets.add(value)

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"count": self.count, "sum": self.total, "min": self.least, "max": self.greatest}
        if self.buckets is not None:
            told["buckets"] = _flat(self.buckets.counts)
        return told


@dataclass(slots=True)
class _Sum:
    """The events of one kind of one role that one line stands for."""

    kind: str
    since: float
    first_step: int
    last: Line = field(default_factory=dict)
    count: int = 0
    fields: dict[str, _Field] = field(default_factory=dict)
    parts: dict[str, _Field] = field(default_factory=dict)
    stale: Counter[int] = field(default_factory=Counter)  # steps by the mean of their reads
    reads: Counter[int] = field(default_factory=Counter)  # where a step's event lists them
    slowest: list[list[float]] = field(default_factory=list)

    def add(self, line: Line, *, slow: bool) -> None:
        self.last = line
        self.count += 1
        values = line["values"]
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                _field(self.fields, name, timed=name in TIMED).add(value)
        if self.kind == "step":
            parts = parts_of(values)
            if all(math.isfinite(part) for part in parts):
                _field(self.parts, "compute", timed=True).add(parts[0])
                _field(self.parts, "other", timed=True).add(parts[2])
            self._add_staleness(values)
            if slow:
                self.slowest.append([line["step"], values.get("seconds") or 0.0, values.get("exposed_s") or 0.0])

    def _add_staleness(self, values: Mapping[str, Any]) -> None:
        rounded = rounded_staleness(values)
        if rounded is not None:
            self.stale[rounded] += 1
        if isinstance(values.get("staleness"), list):
            self.reads.update(int(item) for item in values["staleness"])

    def line(self) -> Line:
        """The line to write."""
        told: dict[str, Any] = {
            "of": self.kind,
            "count": self.count,
            "since": self.since,
            "first_step": self.first_step,
            "last": self.last["values"],
            "fields": {name: each.to_dict() for name, each in self.fields.items()},
        }
        if self.parts:
            told["parts"] = {name: each.to_dict() for name, each in self.parts.items()}
        for name, counted in (("staleness", self.stale), ("reads", self.reads)):
            if counted:
                told[name] = {str(value): counted[value] for value in sorted(counted)}
        if self.slowest:
            told["slowest"] = self.slowest
        return {**self.last, "kind": SUMS, "values": told}


def _field(fields: dict[str, _Field], name: str, *, timed: bool) -> _Field:
    if name not in fields:
        fields[name] = _Field(buckets=Buckets(LINE_PRECISION) if timed else None)
    return fields[name]


@dataclass(frozen=True, slots=True)
class FieldSums:
    """What a line of kind `SUMS` says about one name."""

    count: int
    total: float
    least: float
    greatest: float
    buckets: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> FieldSums:
        """Read the sums as a line's ``fields`` or ``parts`` have them."""
        flat = told.get("buckets") or []
        pairs = zip(itertools.accumulate(flat[::2]), flat[1::2], strict=True)
        return cls(int(told["count"]), told["sum"], told["min"], told["max"], tuple(pairs))

    @property
    def mean(self) -> float:
        """The mean of the values, of which there is at least one."""
        return self.total / self.count

    def values(self) -> Iterator[tuple[float, int]]:
        """About what the values were, and how often: right within `zmqtrain.observe.spread.LINE_PRECISION`."""
        standing = Buckets(LINE_PRECISION)
        for bucket, count in self.buckets:
            yield min(max(standing.value(bucket), self.least), self.greatest), count


def fields_of(values: Mapping[str, Any]) -> dict[str, FieldSums]:
    """The sums in the values of a line of kind `SUMS`, by the values' names: of those that any event had."""
    return _sums_in(values.get("fields"))


def _sums_in(told: Mapping[str, Any] | None) -> dict[str, FieldSums]:
    found = {name: FieldSums.of(each) for name, each in (told or {}).items()}
    return {name: each for name, each in found.items() if each.count > 0}


def parts_in(values: Mapping[str, Any], fields: Mapping[str, FieldSums]) -> dict[str, FieldSums]:
    """The three parts of `parts_of` in the values of a line about steps, whose fields are ``fields``."""
    parts = _sums_in(values.get("parts"))
    return {**parts, "exposed": fields["exposed_s"]} if "exposed_s" in fields else parts
