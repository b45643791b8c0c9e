"""A run's state, for the page and the terminal: a fold of its events, of bounded size however long the run is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from zmqtrain.observe.dashboard.curve import Curve
from zmqtrain.observe.dashboard.places import GONE, places
from zmqtrain.observe.peer_order import peer_order
from zmqtrain.observe.progress import Progress
from zmqtrain.observe.slowness import SlowNow
from zmqtrain.observe.summary import metrics_of
from zmqtrain.observe.sums import fields_of, mean_staleness, parts_in, parts_of
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.words import counted

Json: TypeAlias = dict[str, Any]

#: The most groups with a curve of their own.
MOST_GROUPS = 8
#: The newest events that the page can show.
MOST_FEED = 1000
#: The share of the newest step in a worker's averages.
NEW = 0.1
#: Seconds without a step after which a worker that is still a member is shown as quiet.
QUIET_S = 10.0
#: Events that have curves or tables, and would only fill the feed.
_CURVES = ("schema", "links", "load", "traffic", "step", "sums", "span", "spread", "samples", "momentum", "eval")
#: Of what workers have averages, beside the parts of a step.
_MEANS = ("samples",)
#: What becomes of a member, by the kind of event that says so.
_STATES = {"join": "there", "leave": "left", "lost": "lost", "failed": "failed", "exit": "ended"}
_HEALTH = {"there": "in the run", "left": "has left", "lost": "lost", "failed": "failed", "ended": "has ended"}
_ALARMS = ("lost", "slow", "failed", "halt", "warning", "checkpoint failed", "checkpoint late", "refused", "model failed")


class RunState:
    """Feed it events (`add`), then take `to_dict`."""

    def __init__(self, *, group_size: int = 1, before: RunState | None = None) -> None:
        """``before``: what was shown until now; its feed goes on, with its numbers."""
        self._group_size = max(1, group_size)
        self.version = 0
        """The number of events that were taken."""
        self.start: float | None = None
        self._newest = 0.0
        self._curves = {name: _Curves() for name in ("loss", "lr", "staleness")}
        self._eval: dict[str, Curve] = defaultdict(Curve)
        self._split = {name: Curve() for name in ("compute", "exposed", "other")}
        self._workers: dict[str, _Worker] = {}
        self._members: dict[str, Json] = {}
        self._placed: tuple[object, Sequence[Json]] = None, ()  # of what the newest picture of the hosts was made, and the picture
        self._served: dict[str, Counter[int]] = {}
        self._loads: dict[str, Json] = {}
        self._seen: Counter[int] = Counter()
        self._traffic: dict[str, Mapping[str, int]] = {}
        self._so_far: dict[str, Mapping[str, int]] = {}  # large messages, of members that have not left yet
        self._checkpoints: Json = {"newest": None, "complete": 0, "failed": 0}
        self._progress, self._slow = Progress(), SlowNow()
        self._feed: deque[Json] = deque(maxlen=MOST_FEED) if before is None else before._feed
        self._fed: int = 0 if before is None else before._fed

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
        elif kind == "load":
            self._loads[peer] = {"peer": peer, "host": str(event.get("host") or ""), **_load(values)}
        elif kind == "traffic":
            self._traffic[peer] = dict(values.get("sent") or {})
        elif kind == "links":
            # Of links that there are: what went over one before, such as to a worker that is lost, was sent all the same.
            sent = {to: int(row[0]) for to, row in dict(values.get("sent") or {}).items()}
            self._so_far[peer] = {**self._so_far.get(peer, {}), **sent}
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
        if kind == "exit" and member.get("state") in ("left", *GONE):
            return  # how it went is known already
        member["state"], member["at"] = _STATES[kind], at
        reason = "" if kind in ("join", "leave") else str(values.get("reason") or "")
        member["reason"] = reason.removeprefix(f"{peer} failed: ")  # who, and what became of it, is shown beside it
        member["lost"] += kind == "lost"

    def _tell(self, kind: str, peer: str, step: Any, time: float, values: Mapping[str, Any]) -> None:
        text = values.get("reason") or values.get("text")
        if not text:
            text = ", ".join(filter(None, (_told(key, value) for key, value in values.items())))
        self._fed += 1
        item = {"n": self._fed, "time": time, "kind": kind, "peer": peer, "step": step, "text": str(text)[:500]}
        self._feed.append({**item, "alarm": kind in _ALARMS or str(text).startswith("warning")})

    def _worker(self, peer: str, rank: int, event: Mapping[str, Any]) -> _Worker:
        if peer not in self._workers:
            self._workers[peer] = _Worker(peer, str(event.get("host") or ""), rank // self._group_size)
        return self._workers[peer]

    def _add_step(self, peer: str, rank: int, event: Mapping[str, Any], at: float, values: Mapping[str, Any]) -> None:
        means = {name: (value, 1) for name in ("loss", "lr", *_MEANS) if (value := _number(values.get(name))) is not None}
        stale = mean_staleness(values)
        if stale is not None and math.isfinite(stale):
            means["staleness"] = stale, 1
        staleness = values.get("staleness")
        reads = staleness if isinstance(staleness, list) else [staleness]
        self._seen.update(round(each) for each in map(_number, reads) if each is not None)
        worker, step = self._worker(peer, rank, event), int(event["step"])
        worker.loss = _number(values.get("loss"))
        self._add_steps(worker, step, step, at, dict(zip(self._split, parts_of(values), strict=True)), means)

    def _add_sums(self, peer: str, rank: int, event: Mapping[str, Any], at: float, values: Mapping[str, Any]) -> None:
        """A line that stands for many events."""
        last, fields = values.get("last") or {}, fields_of(values)
        step, count = int(event["step"]), max(1, int(values.get("count") or 1))
        middle = (float(values.get("first_step") or step) + step) / 2
        means = {name: (each.mean, each.count) for name, each in fields.items()}
        if values.get("of") == "eval":
            for name in metrics_of(last).keys() & means.keys():
                self._eval[name.removeprefix("eval_")].add(middle, at, *means[name])
        if values.get("of") != "step":
            return
        stale = Counter({int(each): int(times) for each, times in (values.get("staleness") or {}).items()})
        self._seen.update(stale)
        if stale and "staleness" not in means:  # its steps list the staleness of each read
            means["staleness"] = _mean(stale), stale.total()
        worker = self._worker(peer, rank, event)
        worker.loss = _number(last.get("loss"))
        parts = {name: each.mean for name, each in parts_in(values, fields).items() if name in self._split}
        self._add_steps(worker, step, middle, at, parts, means, count)

    def _add_steps(
        self,
        worker: _Worker,
        step: int,
        middle: float,
        at: float,
        parts: Mapping[str, float],
        means: Mapping[str, tuple[float, int]],
        count: int = 1,
    ) -> None:
        """Take ``count`` steps of a worker up to ``step``, around ``middle``. ``means``: means by name."""
        for name, value in parts.items():
            self._split[name].add(middle, at, value, count)
        for name, curves in self._curves.items():
            if name in means:
                curves.add(worker.group, middle, at, *means[name])
        worker.add(step, at, {**parts, **{name: means.get(name, (0.0, 0))[0] for name in _MEANS}}, count)

    def feed(self, after: int = 0) -> list[Json]:
        """The newest events for people, except those up to number ``after``."""
        missing = min(len(self._feed), self._fed - after)
        return list(islice(self._feed, len(self._feed) - max(0, missing), None))

    def to_dict(self) -> Json:
        """Everything but the feed, as plain values."""
        workers = [self._workers[peer] for peer in sorted(self._workers, key=peer_order)]
        served = sum(self._served.values(), Counter[int]())
        staleness = served or self._seen
        slow = self._slow.to_list()
        named = {each["peer"] for each in slow}
        shown = [self._shown(worker, slow=worker.peer in named) for worker in workers]
        parts = {name: sum(worker["means"].get(name, 0.0) for worker in shown) for name in self._split}
        whole = sum(parts.values())
        members = [{**self._members[peer], "health": self._health(peer)} for peer in sorted(self._members, key=peer_order)]
        return {
            "start": self.start,
            "newest": self._newest,
            **self._progress.to_dict(),
            "slow": slow,
            "loss": self._curves["loss"].mean.to_dict(),
            "group_loss": self._curves["loss"].of_groups(),
            "lr": self._curves["lr"].mean.to_dict(),
            "stale": self._curves["staleness"].mean.to_dict(),
            "group_stale": self._curves["staleness"].of_groups(),
            "eval": {name: curve.to_dict() for name, curve in self._eval.items()},
            "split": {name: curve.to_dict() for name, curve in self._split.items()},
            "workers": shown,
            "members": members,
            "places": self._places_of(members, named),
            "servers": [self._loads[peer] for peer in sorted(self._loads, key=peer_order)],
            "staleness": {
                "counts": sorted(staleness.items()),
                "by": "servers" if served else "workers",
                "mean": _mean(staleness) if staleness else None,
            },
            "samples_per_s": sum(worker["samples_per_s"] for worker in shown),
            "shares": {name: seconds / whole for name, seconds in parts.items()} if whole else None,
            "traffic": self._matrix(),
            "checkpoints": self._checkpoints,
        }

    def _places_of(self, members: Sequence[Json], slow: set[str]) -> Sequence[Json]:
        """The hosts' picture, which is made anew only if something in it has changed."""
        seen = slow, [(each["peer"], each["host"], each["state"], each["health"]) for each in members]
        if seen != self._placed[0]:
            self._placed = seen, places(members, slow, self._group_size)
        return self._placed[1]

    def _shown(self, worker: _Worker, *, slow: bool) -> Json:
        quiet_s = self._newest - (self.start or 0.0) - worker.at
        words = [self._health(worker.peer), "slow" if slow else ""]
        state = self._members.get(worker.peer, {}).get("state")
        quiet = state == "there" and quiet_s > QUIET_S
        return {
            **worker.to_dict(),
            "health": ", ".join(filter(None, words)),
            "quiet_s": quiet_s if quiet else None,
            "trouble": slow or quiet or state in GONE,
        }

    def _health(self, peer: str) -> str:
        """What became of a member, in words; empty: nothing is known."""
        member = self._members.get(peer)
        if member is None:
            return ""
        before = f", was lost {counted(member['lost'], 'time')}" if member["lost"] and member["state"] == "there" else ""
        return _HEALTH[member["state"]] + before

    def _matrix(self) -> Json | None:
        traffic = {**self._so_far, **self._traffic}
        if not traffic:
            return None
        rows = sorted(traffic, key=peer_order)[:64]
        peers = sorted({to for row in rows for to in traffic[row]}, key=peer_order)[:64]
        return {"rows": rows, "peers": peers, "bytes": [[int(traffic[row].get(to, 0)) for to in peers] for row in rows]}


class _Curves:
    """The curve of a figure of all workers, and those of the first groups."""

    def __init__(self) -> None:
        self.mean = Curve()
        self._groups: dict[int, Curve] = defaultdict(Curve)

    def add(self, group: int, step: float, at: float, value: float, count: int) -> None:
        """Take ``count`` values of a group with this mean."""
        self.mean.add(step, at, value, count)
        if group < MOST_GROUPS:
            self._groups[group].add(step, at, value, count)

    def of_groups(self) -> Json:
        """The groups' curves; none if there is only one, whose curve is the mean."""
        return {str(group): curve.to_dict() for group, curve in sorted(self._groups.items())} if len(self._groups) > 1 else {}


class _Worker:
    """A worker's newest step, and averages in which the newest steps count most."""

    def __init__(self, peer: str, host: str, group: int) -> None:
        self.peer, self.host, self.group = peer, host, group
        self.step, self.at, self.steps = -1, 0.0, 0
        self.loss: float | None = None
        self._means: dict[str, float] = {}

    def add(self, step: int, at: float, means: Mapping[str, float], count: int) -> None:
        """``count`` steps whose means these are."""
        self.step, self.at, self.steps = step, at, self.steps + count
        new = 1 - (1 - NEW) ** count
        for name, value in means.items():
            self._means[name] = value if name not in self._means or self.steps <= 2 else (1 - new) * self._means[name] + new * value

    def to_dict(self) -> Json:
        seconds = sum(self._means.get(name, 0.0) for name in ("compute", "exposed", "other"))
        rate = self._means.get("samples", 0.0) / seconds if seconds else 0.0
        means = {name: float(f"{value:.4g}") for name, value in self._means.items()}
        return {
            "peer": self.peer, "host": self.host, "group": self.group, "step": self.step, "at": round(self.at, 3),
            "loss": self.loss, "seconds": seconds,
            "means": means, "samples_per_s": round(rate, 1),
        }  # fmt: skip


def _number(value: Any) -> float | None:
    """A finite number; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _mean(counts: Counter[int]) -> float:
    """The mean of what was counted, which is not nothing."""
    return sum(each * count for each, count in counts.items()) / counts.total()


def _load(values: Mapping[str, Any]) -> Json:
    """What a server says of its load: shares and rates."""
    seconds = _number(values.get("seconds")) or 1.0
    rates = {f"{name}_per_s": (_number(values.get(name)) or 0.0) / seconds for name in ("messages", "bytes")}
    return {**rates, **{name: _number(values.get(name)) or 0.0 for name in ("busy", "waiting", "waiting_most")}}


def _told(key: str, value: Any) -> str:
    """A value of an event for people; empty: it tells them nothing."""
    timed = key.endswith("_s") and not key.endswith("_per_s")
    name = (key.removesuffix("_s") if timed else key).replace("_", " ")
    if value is None or value is False or isinstance(value, dict | list):
        return ""
    if value is True:
        return name
    if not isinstance(value, int | float):
        return f"{name} {value}"
    if key == "seconds":
        return f"took {rounded_duration(value)}"
    if timed:
        return f"{name} {rounded_duration(value)}"
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
