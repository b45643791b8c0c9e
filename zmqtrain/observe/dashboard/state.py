"""A run's state, for the page and the terminal: a fold of its events, of bounded size however long the run is."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeAlias

from zmqtrain.observe.dashboard.curve import Curve
from zmqtrain.observe.peer_order import peer_order
from zmqtrain.observe.progress import Progress
from zmqtrain.observe.slowness import SlowNow
from zmqtrain.observe.summary import metrics_of
from zmqtrain.observe.sums import FieldSums, fields_of, parts_in, parts_of

Json: TypeAlias = dict[str, Any]

#: The most groups with a curve of their own.
MOST_GROUPS = 8
#: The newest events that the page can show.
MOST_FEED = 1000
#: The share of the newest step in a worker's averages.
NEW = 0.1
#: A worker is a straggler if its own part of a step takes this many times as long as the others' median, and this much longer.
SLOWER, SLOWER_S = 1.5, 0.001
#: A worker that is there and has done no step for so many seconds is said to be quiet, while the run lasts.
QUIET_S = 10.0
#: Events that are drawn as curves, and would only fill the feed.
_CURVES = ("schema", "links", "step", "sums", "span", "spread", "samples", "momentum", "eval")
#: What becomes of a member, by the kind of event that says so.
_STATES = {"join": "there", "leave": "left", "lost": "lost", "failed": "failed", "exit": "ended"}
_HEALTH = {"there": "in the run", "left": "has left", "lost": "lost", "failed": "failed", "ended": "has ended"}
_ALARMS = ("lost", "slow", "failed", "halt", "warning", "checkpoint failed", "checkpoint late", "refused", "model failed")


class RunState:
    """Feed it events (`add`), then take `to_dict`."""

    def __init__(self, *, group_size: int = 1) -> None:
        self._group_size = max(1, group_size)
        self.version = 0
        """The number of events that were taken."""
        self.start: float | None = None
        self._newest = 0.0
        self._loss, self._lr = Curve(), Curve()
        self._groups: dict[int, Curve] = defaultdict(Curve)
        self._eval: dict[str, Curve] = defaultdict(Curve)
        self._split = {name: Curve() for name in ("compute", "exposed", "other")}
        self._workers: dict[str, _Worker] = {}
        self._members: dict[str, Json] = {}
        self._served: dict[str, Counter[int]] = {}
        self._seen: Counter[int] = Counter()
        self._traffic: dict[str, Mapping[str, int]] = {}
        self._so_far: dict[str, Mapping[str, int]] = {}  # large messages, of members that have not left yet
        self._checkpoints: Json = {"newest": None, "complete": 0, "failed": 0}
        self._progress, self._slow = Progress(), SlowNow()
        self._feed: deque[Json] = deque(maxlen=MOST_FEED)
        self._fed = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a line of ``events.jsonl``. What is not understood is left out."""
        kind, values, step = str(event.get("kind")), event.get("values") or {}, event.get("step")
        time = float(event.get("time") or 0.0)
        role, rank = str(event.get("role")), event.get("rank")
        peer = f"{role}/{rank}" if rank is not None else str(values.get("peer") or role)
        self.version += 1
        self.start = time if self.start is None else self.start
        self._newest = max(self._newest, time)
        at = time - self.start
        self._progress.add(event, time)
        if kind == "step" and isinstance(step, int) and isinstance(rank, int):
            self._add_step(peer, rank, event, at, values)
        elif kind == "sums" and isinstance(step, int) and isinstance(rank, int):
            self._add_sums(peer, rank, event, at, values)
        elif kind == "eval" and isinstance(step, int):
            for name, value in metrics_of(values).items():
                self._eval[name.removeprefix("eval_")].add(step, at, value)
        elif kind == "server":
            self._served[peer] = Counter({int(key): int(count) for key, count in dict(values.get("staleness") or {}).items()})
        elif kind == "traffic":
            self._traffic[peer] = dict(values.get("sent") or {})
        elif kind == "links":
            self._so_far[peer] = {to: int(row[0]) for to, row in dict(values.get("sent") or {}).items()}
        elif kind == "slow":
            self._slow.add(peer, values)
        elif kind in ("checkpoint complete", "checkpoint failed", "checkpoint late"):
            self._checkpoints["complete" if kind == "checkpoint complete" else "failed"] += 1
            if kind == "checkpoint complete":
                self._checkpoints["newest"] = step
        if kind in _STATES:
            self._member(peer, kind, event, at, values)
        if kind not in _CURVES:
            self._tell(kind, peer, step, time, values)

    def _member(self, peer: str, kind: str, event: Mapping[str, Any], at: float, values: Mapping[str, Any]) -> None:
        member = self._members.setdefault(
            peer, {"peer": peer, "host": str(event.get("host") or values.get("host") or ""), "lost": 0}
        )
        if kind == "exit" and member.get("state") in ("left", "lost", "failed"):
            return  # how it went is known already
        member["state"], member["at"] = _STATES[kind], at
        member["reason"] = "" if kind in ("join", "leave") else str(values.get("reason") or "")
        member["lost"] += kind == "lost"

    def _tell(self, kind: str, peer: str, step: Any, time: float, values: Mapping[str, Any]) -> None:
        text = values.get("reason") or values.get("text")
        if not text:
            text = ", ".join(f"{key} {_told(value)}" for key, value in values.items() if not isinstance(value, dict | list))
        self._fed += 1
        item = {"n": self._fed, "time": time, "kind": kind, "peer": peer, "step": step, "text": str(text)[:500]}
        self._feed.append({**item, "alarm": kind in _ALARMS or str(text).startswith("warning")})

    def _worker(self, peer: str, rank: int, event: Mapping[str, Any]) -> _Worker:
        if peer not in self._workers:
            self._workers[peer] = _Worker(peer, str(event.get("host") or ""), rank // self._group_size)
        return self._workers[peer]

    def _add_step(self, peer: str, rank: int, event: Mapping[str, Any], at: float, values: Mapping[str, Any]) -> None:
        step, worker = int(event["step"]), self._worker(peer, rank, event)
        parts = dict(zip(self._split, parts_of(values), strict=True))
        for name, value in parts.items():
            self._split[name].add(step, at, value)
        self._learn(worker, rank, step, at, values)
        staleness = values.get("staleness")
        reads = staleness if isinstance(staleness, list) else [staleness]
        self._seen.update(round(each) for each in map(_number, reads) if each is not None)
        worker.add(step, at, parts, samples=_number(values.get("samples")) or 0.0, data_s=_number(values.get("data_s")) or 0.0)

    def _add_sums(self, peer: str, rank: int, event: Mapping[str, Any], at: float, values: Mapping[str, Any]) -> None:
        """A line that stands for many events."""
        last, fields = values.get("last") or {}, fields_of(values)
        step, count = int(event["step"]), max(1, int(values.get("count") or 1))
        middle = (float(values.get("first_step") or step) + step) / 2
        if values.get("of") == "eval":
            for name in metrics_of(last).keys() & fields.keys():
                self._eval[name.removeprefix("eval_")].add(middle, at, _mean(fields[name]), fields[name].count)
        if values.get("of") != "step":
            return
        worker = self._worker(peer, rank, event)
        parts = {name: _mean(each) for name, each in parts_in(values, fields).items() if name in self._split}
        for name, value in parts.items():
            self._split[name].add(middle, at, value, count)
        curves = {"loss": [self._loss], "lr": [self._lr]}
        if rank // self._group_size < MOST_GROUPS:
            curves["loss"].append(self._groups[rank // self._group_size])
        for name, each in curves.items():
            if name in fields and fields[name].count:
                for curve in each:
                    curve.add(middle, at, _mean(fields[name]), fields[name].count)
        self._seen.update({int(stale): int(times) for stale, times in (values.get("staleness") or {}).items()})
        samples, data_s = (_mean(fields[name]) if name in fields else 0.0 for name in ("samples", "data_s"))
        worker.loss = _number(last.get("loss"))
        worker.add(step, at, parts, samples=samples, data_s=data_s, count=count)

    def _learn(self, worker: _Worker, rank: int, step: int, at: float, values: Mapping[str, Any]) -> None:
        loss, lr = _number(values.get("loss")), _number(values.get("lr"))
        worker.loss = loss
        if loss is not None:
            self._loss.add(step, at, loss)
            if rank // self._group_size < MOST_GROUPS:
                self._groups[rank // self._group_size].add(step, at, loss)
        if lr is not None:
            self._lr.add(step, at, lr)

    def feed(self, after: int = 0) -> list[Json]:
        """The newest events for people, except those up to number ``after``."""
        missing = min(len(self._feed), self._fed - after)
        return list(islice(self._feed, len(self._feed) - max(0, missing), None))

    def to_dict(self) -> Json:
        """Everything but the feed, as plain values."""
        workers = [self._workers[peer] for peer in sorted(self._workers, key=peer_order)]
        groups = {str(group): curve.to_dict() for group, curve in sorted(self._groups.items())}
        served = sum(self._served.values(), Counter[int]())
        staleness = served or self._seen
        slowest = straggler(workers)
        shown = [self._shown(worker, slowest) for worker in workers]
        parts = {name: sum(worker["means"].get(name, 0.0) for worker in shown) for name in self._split}
        whole = sum(parts.values())
        return {
            "start": self.start,
            "newest": self._newest,
            **self._progress.to_dict(),
            "slow": self._slow.to_list(),
            "loss": self._loss.to_dict(),
            "group_loss": groups if len(groups) > 1 else {},
            "lr": self._lr.to_dict(),
            "eval": {name: curve.to_dict() for name, curve in self._eval.items()},
            "split": {name: curve.to_dict() for name, curve in self._split.items()},
            "workers": shown,
            "members": [{**self._members[peer], "health": self._health(peer)} for peer in sorted(self._members, key=peer_order)],
            "straggler": slowest,
            "staleness": {
                "counts": sorted(staleness.items()),
                "by": "servers" if served else "workers",
                "mean": sum(each * count for each, count in staleness.items()) / staleness.total() if staleness else None,
            },
            "samples_per_s": sum(worker["samples_per_s"] for worker in shown),
            "shares": {name: seconds / whole for name, seconds in parts.items()} if whole else None,
            "traffic": self._matrix(),
            "checkpoints": self._checkpoints,
        }

    def _shown(self, worker: _Worker, slowest: Json | None) -> Json:
        quiet_s = self._newest - (self.start or 0.0) - worker.at
        words = [self._health(worker.peer), "straggler" if slowest is not None and slowest["peer"] == worker.peer else ""]
        there = self._members.get(worker.peer, {}).get("state") == "there"
        return {
            **worker.to_dict(),
            "health": ", ".join(filter(None, words)),
            "quiet_s": quiet_s if there and quiet_s > QUIET_S else None,
        }

    def _health(self, peer: str) -> str:
        """What became of a member, in words; empty: nothing is known."""
        member = self._members.get(peer)
        if member is None:
            return ""
        before = f", was lost {member['lost']} time(s)" if member["lost"] and member["state"] == "there" else ""
        return _HEALTH[member["state"]] + before

    def _matrix(self) -> Json | None:
        traffic = {**self._so_far, **self._traffic}
        if not traffic:
            return None
        rows = sorted(traffic, key=peer_order)[:64]
        peers = sorted({to for row in rows for to in traffic[row]}, key=peer_order)[:64]
        return {"rows": rows, "peers": peers, "bytes": [[int(traffic[row].get(to, 0)) for to in peers] for row in rows]}


class _Worker:
    """A worker's newest step, and averages in which the newest steps count most."""

    def __init__(self, peer: str, host: str, group: int) -> None:
        self.peer, self.host, self.group = peer, host, group
        self.step, self.at, self.steps = -1, 0.0, 0
        self.loss: float | None = None
        self._means: dict[str, float] = {}

    def add(self, step: int, at: float, parts: Mapping[str, float], *, samples: float, data_s: float, count: int = 1) -> None:
        """``count`` steps whose means these are."""
        self.step, self.at, self.steps = step, at, self.steps + count
        new = 1 - (1 - NEW) ** count
        for name, value in {**parts, "samples": samples, "data": data_s}.items():
            self._means[name] = value if name not in self._means or self.steps <= 2 else (1 - new) * self._means[name] + new * value

    @property
    def own_s(self) -> float:
        """Seconds of a step in which it waits for nobody else: it computes, or loads data."""
        return self._means.get("compute", 0.0) + self._means.get("data", 0.0)

    def to_dict(self) -> Json:
        seconds = sum(self._means.get(name, 0.0) for name in ("compute", "exposed", "other"))
        rate = self._means.get("samples", 0.0) / seconds if seconds else 0.0
        means = {name: float(f"{value:.4g}") for name, value in self._means.items()}
        return {
            "peer": self.peer, "host": self.host, "group": self.group, "step": self.step, "at": round(self.at, 3),
            "loss": self.loss, "seconds": seconds,
            "means": means, "samples_per_s": round(rate, 1),
        }  # fmt: skip


def straggler(workers: list[_Worker]) -> Json | None:
    """The worker whose own part of a step takes longest, if that is much longer than the others' median; else ``None``."""
    if len(workers) < 2:
        return None
    slowest = max(workers, key=lambda worker: worker.own_s)
    others = statistics.median(worker.own_s for worker in workers if worker is not slowest)
    if slowest.own_s < SLOWER * others or slowest.own_s - others < SLOWER_S:
        return None
    return {"peer": slowest.peer, "host": slowest.host, "seconds": slowest.own_s, "others": others}


def _number(value: Any) -> float | None:
    """A finite number; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _mean(sums: FieldSums) -> float:
    return sums.total / sums.count if sums.count else 0.0


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
