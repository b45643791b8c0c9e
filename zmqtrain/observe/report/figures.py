"""The figures of a run's report: a fold of its events. Pure; sizes are bounded, however long and wide the run was."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zmqtrain.observe.peer_order import peer_order
from zmqtrain.observe.spread import Spread
from zmqtrain.observe.summary import metrics_of
from zmqtrain.observe.sums import SLOWEST, SUMS, fields_of, parts_in, parts_of, rounded_staleness

#: The most points of a curve; more are averaged.
MOST_POINTS = 600
#: Means over groups are taken at each step, or for longer runs at this many ranges of steps.
MOST_RANGES = 10 * MOST_POINTS
#: The most groups with a curve of their own, and the most ranks and peers with a row; more are drawn together.
MOST_ROWS = 32
#: The most steps of a rank of which a median is exact; more are counted in buckets (`zmqtrain.observe.spread`).
MOST_STEPS = 4096
MOST_MARKS = 200

#: What a step's time is divided into.
PARTS = ("compute", "exposed", "other")

#: (step, seconds since the beginning, value)
Point: TypeAlias = tuple[float, float, float]
Json: TypeAlias = dict[str, Any]


class ReportFigures:
    """Feed it the lines of ``events.jsonl`` (`add`), then take `to_dict`."""

    def __init__(self, *, group_size: int = 1) -> None:
        self._group_size = max(1, group_size)
        self._start: float | None = None
        self._loss: dict[int, Rows] = defaultdict(dict)  # by group
        self._eval: dict[str, list[_Row]] = defaultdict(list)
        self._split: dict[str, Rows] = {part: {} for part in PARTS}
        self._ranks: dict[str, dict[str, Spread]] = defaultdict(_new_rank)
        self._slow: list[tuple[float, str, int, float]] = []
        self._served: dict[str, Counter[int]] = {}  # server -> how often it has applied a gradient of each staleness
        self._seen: Counter[int] = Counter()  # by workers, in their steps: the same reads once more where there are servers
        self._spread: Rows = {}
        self._samples: dict[str, Mapping[str, Any]] = {}
        self._traffic: dict[str, Mapping[str, int]] = {}
        self._marks: list[tuple[float, int | None, str]] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Take an event into account."""
        values, time = event.get("values") or {}, float(event.get("time") or 0.0)
        kind, step = event.get("kind"), event.get("step")
        if self._start is None:
            self._start = time
        at = time - self._start
        peer = f"{event.get('role')}/{event.get('rank')}" if event.get("rank") is not None else str(event.get("role"))
        if kind == "step" and isinstance(step, int):
            self._add_step(peer, int(event.get("rank") or 0), step, at, values)
        elif kind == SUMS and isinstance(step, int):
            self._add_sums(peer, int(event.get("rank") or 0), step, at, values)
        elif kind == "eval" and isinstance(step, int):
            for name, value in metrics_of(values).items():
                self._eval[name].append(_Row(at))
                self._eval[name][-1].add(step, value)
        elif kind == "server":
            self._served[peer] = Counter({int(key): int(count) for key, count in dict(values.get("staleness") or {}).items()})
        elif kind == "spread" and isinstance(step, int):
            _row(self._spread, step, at).add(step, float(values.get("distance") or 0.0))
        elif kind == "samples":
            self._samples[peer] = {key: value for key, value in values.items() if isinstance(value, int | float)}
        elif kind == "traffic":
            self._traffic[peer] = dict(values.get("sent") or {})
        elif kind in ("lost", "failed", "halt", "view", "slow") or (kind == "join" and values.get("late")):
            self._mark(str(kind), peer, step, at, values)

    def _add_step(self, peer: str, rank: int, step: int, at: float, values: Mapping[str, Any]) -> None:
        parts = parts_of(values)
        loss = values.get("loss")
        if isinstance(loss, int | float):
            _row(self._loss[rank // self._group_size], step, at).add(step, float(loss))
        for name, seconds in zip(PARTS, parts, strict=True):
            _row(self._split[name], step, at).add(step, seconds)
            self._ranks[peer][name].add(seconds)
        stale = rounded_staleness(values)
        if stale is not None:
            self._seen[stale] += 1
        self._add_slow(peer, step, float(values.get("seconds") or 0.0), float(values.get("exposed_s") or 0.0))

    def _add_sums(self, peer: str, rank: int, step: int, at: float, values: Mapping[str, Any]) -> None:
        """Take a line that stands for many events: a point of the curves for each second, in place of one for each step."""
        kind, key, fields = values.get("of"), -1 - math.floor(at), fields_of(values)
        first = float(values["first_step"])
        if kind == "step":
            if "loss" in fields:
                _row(self._loss[rank // self._group_size], key, at).add(
                    first, fields["loss"].total, fields["loss"].count, last=step
                )
            for name, part in parts_in(values, fields).items():
                _row(self._split[name], key, at).add(first, part.total, part.count, last=step)
                for seconds, times in part.values():
                    self._ranks[peer][name].add(seconds, times)
            self._seen.update({int(stale): count for stale, count in (values.get("staleness") or {}).items()})
            for slow, seconds, exposed in values.get("slowest") or ():
                self._add_slow(peer, slow, seconds, exposed)
        elif kind == "eval":
            for name in metrics_of(values["last"]).keys() & fields.keys():
                self._eval[name].append(_Row(at))
                self._eval[name][-1].add(first, fields[name].total, fields[name].count, last=step)
        elif kind == "spread" and "distance" in fields:
            _row(self._spread, key, at).add(first, fields["distance"].total, fields["distance"].count, last=step)
        elif kind == "samples":
            self._samples[peer] = {name: value for name, value in values["last"].items() if isinstance(value, int | float)}

    def _add_slow(self, peer: str, step: int, seconds: float, exposed: float) -> None:
        if step > 0:  # the first step is slow everywhere
            self._slow.append((seconds, peer, step, exposed))
            if len(self._slow) > 50 * SLOWEST:
                self._slow = sorted(self._slow, reverse=True)[:SLOWEST]

    def _mark(self, kind: str, peer: str, step: Any, at: float, values: Mapping[str, Any]) -> None:
        if kind == "view":
            text = f"from step {step} on: {len(values.get('members') or [])} members ({values.get('reason')})"
            if any(other[2] == text for other in self._marks):
                return  # each member reports it
        else:
            text = str(values.get("reason") or f"{kind}: {peer}")
        if len(self._marks) < MOST_MARKS:
            self._marks.append((at, step if isinstance(step, int) else None, text))

    def to_dict(self) -> Json:
        """Return plain values, for JSON."""
        groups = dict(sorted(self._loss.items()))
        return {
            "loss": {
                "mean": _curve(_mean_of_groups(groups.values())),
                "groups": {str(g): _curve(rows.values()) for g, rows in groups.items()} if 1 < len(groups) <= MOST_ROWS else {},
                "count": len(groups),
            },
            "eval": {name: thinned(rows) for name, rows in self._eval.items()},
            "split": {name: _curve(rows.values()) for name, rows in self._split.items()},
            "ranks": _ranks(self._ranks),
            "slowest": [
                {"peer": peer, "step": step, "seconds": seconds, "exposed_s": exposed}
                for seconds, peer, step, exposed in sorted(self._slow, reverse=True)[:SLOWEST]
            ],
            "staleness": {str(value): count for value, count in sorted(self._staleness().items())},
            "spread": _curve(self._spread.values()),
            "samples": dict(sorted(self._samples.items(), key=lambda item: peer_order(item[0]))[:MOST_ROWS]),
            "traffic": _matrix(self._traffic),
            "marks": self._marks,
        }

    def _staleness(self) -> Counter[int]:
        """The staleness that servers counted or, without servers, that workers saw; as in the summary."""
        return sum(self._served.values(), Counter[int]()) or self._seen


@dataclass(slots=True)
class _Row:
    """The values of a step, or of a second where lines stand for many events, of which a point of a curve shows the mean."""

    at: float
    steps: float = 0.0
    total: float = 0.0
    count: float = 0
    weight: float = 0
    """The number of events of one rank that it stands for."""
    first: float = math.inf
    last: float = -math.inf

    def add(self, first: float, total: float, count: float = 1, *, last: float | None = None) -> None:
        """Add ``count`` values of the steps from ``first`` to ``last``: their sum."""
        last = first if last is None else last
        self.first, self.last = min(self.first, first), max(self.last, last)
        self.steps += (first + last) / 2 * count
        self.total += total
        self.count += count
        self.weight = max(self.weight, count)

    @property
    def step(self) -> float:
        return self.steps / self.count

    @property
    def mean(self) -> float:
        return self.total / self.count


Rows: TypeAlias = dict[int, _Row]


def _row(rows: Rows, key: int, at: float) -> _Row:
    """The row of a step, or (as a negative number) of a second."""
    if key not in rows:
        rows[key] = _Row(at)
    return rows[key]


def _mean_of_groups(groups: Iterable[Rows]) -> list[_Row]:
    """The mean of the groups' means at each step, or at each range of steps if there are many."""
    groups = list(groups)
    steps = 1 + max((row.last for rows in groups for row in rows.values()), default=0)
    width = max(1.0, steps / MOST_RANGES)
    mean: Rows = {}
    for rows in groups:
        own: Rows = {}
        for row in sorted(rows.values(), key=lambda row: row.first):
            places = range(int(row.first / width), int(row.last / width) + 1)
            share = 1 / len(places)  # the values of many steps are divided among their ranges
            for place in places:
                first = max(row.first, place * width)
                last = max(first, min(row.last, (place + 1) * width - 1))
                _row(own, place, row.at).add(first, row.total * share, row.count * share, last=last)
        for place, row in own.items():
            _row(mean, place, row.at).add(row.first, row.mean, last=row.last)
    return list(mean.values())


def _curve(rows: Iterable[_Row]) -> list[Point]:
    return thinned(sorted(rows, key=lambda row: row.step))


def thinned(rows: Sequence[_Row]) -> list[Point]:
    """At most `MOST_POINTS`, each the mean of a run of neighbours."""
    if len(rows) <= MOST_POINTS:
        return [_point(row.step, row.at, row.mean) for row in rows]
    cuts = [len(rows) * part // MOST_POINTS for part in range(MOST_POINTS + 1)]
    runs = (rows[start:stop] for start, stop in itertools.pairwise(cuts))
    return [
        _point(run[0].step, run[0].at, statistics.fmean((row.mean for row in run), (row.weight for row in run))) for run in runs
    ]


def _point(step: float, at: float, value: float) -> Point:
    return int(step) if step.is_integer() else step, at, value


def _new_rank() -> dict[str, Spread]:
    return {part: Spread(MOST_STEPS) for part in PARTS}


def _ranks(ranks: Mapping[str, Mapping[str, Spread]]) -> list[Json]:
    """One row per rank; for many ranks, the medians of neighbours."""
    ordered = sorted(ranks.items(), key=lambda item: peer_order(item[0]))
    count = min(len(ordered), MOST_ROWS)
    rows = []
    for start, stop in itertools.pairwise(len(ordered) * part // max(1, count) for part in range(count + 1)):
        peers = [peer for peer, _ in ordered[start:stop]]
        medians = {part: statistics.median(rank[part].median() or 0.0 for _, rank in ordered[start:stop]) for part in PARTS}
        name = peers[0] if len(peers) == 1 else f"{peers[0]} to {peers[-1].partition('/')[2]}"
        rows.append({"peer": name, **medians})
    return rows


def _matrix(traffic: Mapping[str, Mapping[str, int]]) -> Json:
    """Bytes from each role (a row of ``bytes``, named in ``rows``) to each peer (``peers``), including the coordinator, and
    ``total``, their sum. For many roles, only the sums of those that sent most."""
    rows = sorted(traffic, key=peer_order)
    peers = sorted({to for sent in traffic.values() for to in sent}, key=peer_order)
    totals = {peer: sum(sent.values()) for peer, sent in traffic.items()}
    found: Json = {"rows": [], "peers": [], "bytes": [], "totals": {}, "count": len(rows), "total": sum(totals.values())}
    if max(len(rows), len(peers)) > MOST_ROWS:
        most = sorted(totals, key=lambda peer: (-totals[peer], peer_order(peer)))[:MOST_ROWS]
        return found | {"totals": {peer: totals[peer] for peer in most}}
    return found | {"rows": rows, "peers": peers, "bytes": [[int(traffic[row].get(to, 0)) for to in peers] for row in rows]}


def figures_of(events: Iterable[Mapping[str, Any]], *, group_size: int = 1) -> Json:
    """All figures of a run."""
    figures = ReportFigures(group_size=group_size)
    for event in events:
        figures.add(event)
    return figures.to_dict()
