"""The figures of a run's report: a fold of its events. Pure; sizes are bounded, however long and wide the run was."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from zmqtrain.observe.peer_order import peer_order
from zmqtrain.observe.summary import mean_staleness, metrics_of

#: The most points of a curve; more are averaged.
MOST_POINTS = 600
#: The most groups with a curve of their own, and the most ranks and peers with a row; more are drawn together.
MOST_ROWS = 32
#: The most steps of which a median over ranks is taken; longer runs are sampled evenly.
MOST_STEPS = 4096
MOST_MARKS = 200
SLOWEST = 12

#: (step, seconds since the beginning, value)
Point: TypeAlias = tuple[float, float, float]
Json: TypeAlias = dict[str, Any]


class Figures:
    """Feed it the lines of ``events.jsonl`` (`add`), then take `to_dict`."""

    def __init__(self, *, group_size: int = 1) -> None:
        self._group_size = max(1, group_size)
        self._start: float | None = None
        self._loss: dict[int, dict[int, list[float]]] = defaultdict(dict)  # group -> step -> [time, sum, count]
        self._eval: dict[str, list[Point]] = defaultdict(list)
        self._split: dict[int, list[float]] = {}  # step -> [time, compute, exposed, other, count]
        self._ranks: dict[str, _Rank] = defaultdict(_Rank)
        self._slow: list[tuple[float, str, int, float]] = []
        self._served: dict[str, Counter[int]] = {}  # server -> how often it has applied a gradient of each staleness
        self._seen: Counter[int] = Counter()  # by workers, in their steps: the same reads once more where there are servers
        self._spread: dict[int, list[float]] = {}  # step -> [time, sum, count]
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
        elif kind == "eval" and isinstance(step, int):
            for name, value in metrics_of(values).items():
                self._eval[name].append((step, at, value))
        elif kind == "server":
            self._served[peer] = Counter({int(key): int(count) for key, count in dict(values.get("staleness") or {}).items()})
        elif kind == "spread" and isinstance(step, int):
            _sum_up(self._spread, step, at, float(values.get("distance") or 0.0))
        elif kind == "samples":
            self._samples[peer] = {key: value for key, value in values.items() if isinstance(value, int | float)}
        elif kind == "traffic":
            self._traffic[peer] = dict(values.get("sent") or {})
        elif kind in ("lost", "failed", "halt", "view") or (kind == "join" and values.get("late")):
            self._mark(str(kind), peer, step, at, values)

    def _add_step(self, peer: str, rank: int, step: int, at: float, values: Mapping[str, Any]) -> None:
        seconds, exposed = float(values.get("seconds") or 0.0), float(values.get("exposed_s") or 0.0)
        compute = min(float(values.get("compute_s") or max(0.0, seconds - exposed)), seconds)
        other = max(0.0, seconds - compute - exposed)
        loss = values.get("loss")
        if isinstance(loss, int | float):
            _sum_up(self._loss[rank // self._group_size], step, at, float(loss))
        row = self._split.setdefault(step, [at, 0.0, 0.0, 0.0, 0])
        for place, value in enumerate((compute, exposed, other, 1), start=1):
            row[place] += value
        self._ranks[peer].add(compute, exposed, other)
        stale = mean_staleness(values)
        if stale is not None:
            self._seen[round(stale)] += 1
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
        groups = {group: _means(rows) for group, rows in sorted(self._loss.items())}
        mean: dict[int, list[float]] = {}
        for rows in self._loss.values():
            for step, (at, total, count) in rows.items():
                _sum_up(mean, step, at, total / count)
        split = sorted((step, *row) for step, row in self._split.items())
        return {
            "loss": {
                "mean": thinned(_means(mean)),
                "groups": {str(g): thinned(points) for g, points in groups.items()} if 1 < len(groups) <= MOST_ROWS else {},
                "count": len(groups),
            },
            "eval": {name: thinned(points) for name, points in self._eval.items()},
            "split": {
                name: thinned([(step, at, parts[place] / parts[3]) for step, at, *parts in split])
                for place, name in enumerate(("compute", "exposed", "other"))
            },
            "ranks": _ranks(self._ranks),
            "slowest": [
                {"peer": peer, "step": step, "seconds": seconds, "exposed_s": exposed}
                for seconds, peer, step, exposed in sorted(self._slow, reverse=True)[:SLOWEST]
            ],
            "staleness": {str(value): count for value, count in sorted(self._staleness().items())},
            "spread": thinned(_means(self._spread)),
            "samples": dict(sorted(self._samples.items(), key=lambda item: peer_order(item[0]))[:MOST_ROWS]),
            "traffic": _matrix(self._traffic),
            "marks": self._marks,
        }

    def _staleness(self) -> Counter[int]:
        """The staleness that servers counted or, without servers, that workers saw; as in the summary."""
        return sum(self._served.values(), Counter[int]()) or self._seen


class _Rank:
    """A rank's step times, sampled evenly, so that the median of any number of steps can be computed."""

    def __init__(self) -> None:
        self._every, self._seen = 1, 0
        self._kept: list[tuple[float, float, float]] = []

    def add(self, *parts: float) -> None:
        if self._seen % self._every == 0:
            self._kept.append((parts[0], parts[1], parts[2]))
            if len(self._kept) >= MOST_STEPS:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._seen += 1

    def medians(self) -> list[float]:
        return [statistics.median(each) for each in zip(*self._kept, strict=True)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS`, each the mean of a run of neighbours."""
    if len(points) <= MOST_POINTS:
        return list(points)
    cuts = [len(points) * part // MOST_POINTS for part in range(MOST_POINTS + 1)]
    runs = (points[start:stop] for start, stop in itertools.pairwise(cuts))
    return [(run[0][0], run[0][1], statistics.fmean(value for _, _, value in run)) for run in runs]


def _sum_up(rows: dict[int, list[float]], step: int, at: float, value: float) -> None:
    row = rows.setdefault(step, [at, 0.0, 0])
    row[1] += value
    row[2] += 1


def _means(rows: Mapping[int, Sequence[float]]) -> list[Point]:
    return [(step, at, total / count) for step, (at, total, count) in sorted(rows.items())]


def _ranks(ranks: Mapping[str, _Rank]) -> list[Json]:
    """One row per rank; for many ranks, the medians of neighbours."""
    ordered = sorted(ranks.items(), key=lambda item: peer_order(item[0]))
    count = min(len(ordered), MOST_ROWS)
    rows = []
    for start, stop in itertools.pairwise(len(ordered) * part // max(1, count) for part in range(count + 1)):
        peers = [peer for peer, _ in ordered[start:stop]]
        medians = [rank.medians() for _, rank in ordered[start:stop]]
        compute, exposed, other = (statistics.median(each) for each in zip(*medians, strict=True))
        name = peers[0] if len(peers) == 1 else f"{peers[0]} to {peers[-1].partition('/')[2]}"
        rows.append({"peer": name, "compute": compute, "exposed": exposed, "other": other})
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
    figures = Figures(group_size=group_size)
    for event in events:
        figures.add(event)
    return figures.to_dict()
