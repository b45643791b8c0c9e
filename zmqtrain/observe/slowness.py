"""Decides which worker is slow, and what of it: its device, its loader or its link. Sans-IO: events come with their time.

Each worker's clocks are kept apart: what a step computes (``compute_s``), what it waits for its batch (``data_s``), and how fast
what others and it send to each other gets through. Waits for other workers say nothing, since all wait for the slowest one. A
worker is compared with the median of the others, over `WINDOW` steps, and is named when `TIMES` windows in a row agree. Times may
vary much from step to step: three quarters of its steps must take longer than three quarters of the others'.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from zmqtrain.net.endpoint import PeerId

What: TypeAlias = Literal["device", "loader", "link"]

#: Steps of which medians are taken; the first ones of a worker, which wait for everything, are left out.
WINDOW, LEFT_OUT = 20, 5
#: Steps between looks at a worker, and looks in a row that must agree. Together they outlast what passes by itself.
STRIDE, TIMES = 10, 3
#: A worker is slow if its work takes longer than the others' by the first factor, until it takes longer by less than the second.
SLOW, FAST_AGAIN = 1.5, 1.25
#: The same of links, whose speeds vary more.
SLOW_LINK, FAST_LINK = 2.0, 1.5
#: A link is slow in both directions: by so much in each, and by `SLOW_LINK` on average.
LEAST_EACH_WAY = 1.4
#: What is slow must make a step longer by at least this share.
MATTERS = 0.1
#: Reports about links that count together, and the least bytes that say something.
REPORTS, LEAST_BYTES = 4, 1 << 20
#: Among more workers each is compared with the median of all, itself included, which is taken anew now and then.
FEW = 16


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker is slow, or (``over``) no longer."""

    peer: PeerId
    what: What
    factor: float
    """How many times as long it takes as the others, or how many times as slow its link is."""
    since: float
    """The time of the first step that counts."""
    since_step: int
    over: bool = False

    @property
    def reason(self) -> str:
        """A sentence that says who is slow in what, how much, and since when."""
        since = f"since step {self.since_step}"
        if self.over:
            return f"{self.peer} is no longer slow: its {self.what} was, {since}"
        if self.what == "link":
            return f"{self.peer} is slow: its link is {self.factor:.1f} times as slow as the others', {since}"
        takes = "its device computes" if self.what == "device" else "its loader makes it wait, so that its own part of a step takes"
        return f"{self.peer} is slow: {takes} {self.factor:.1f} times as long as the others', {since}"

    def values(self) -> dict[str, Any]:
        """The values of a ``slow`` event."""
        told = {"what": self.what, "factor": self.factor, "since": self.since, "since_step": self.since_step, "over": self.over}
        return {**told, "reason": self.reason}


class SlowNow:
    """Who is slow at present, from the ``slow`` events of a run."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Mapping[str, Any]] = {}

    def add(self, peer: str, values: Mapping[str, Any]) -> None:
        """Take the values of a ``slow`` event."""
        self._values.pop((peer, values["what"]), None)
        if not values["over"]:
            self._values[peer, values["what"]] = values

    def to_list(self) -> list[dict[str, Any]]:
        """Each as ``peer``, ``what``, ``factor`` and ``reason``, in the order in which they became slow."""
        keys = ("what", "factor", "reason")
        return [{"peer": peer, **{key: values.get(key) for key in keys}} for (peer, _), values in self._values.items()]


@dataclass(slots=True)
class _Step:
    time: float
    step: int
    compute_s: float
    sample_s: float
    data_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Medians:
    """Of a worker's window. ``sample_s``: computing a sample; 0 if its samples are not counted. ``high_``: what three quarters of
    the steps stay below."""

    compute_s: float
    sample_s: float
    data_s: float
    seconds: float
    high_compute_s: float
    high_data_s: float


_COLUMNS = ("compute_s", "sample_s", "data_s", "seconds", "high_compute_s", "high_data_s")


@dataclass(slots=True)
class _Judgment:
    """What was found of one clock of one worker: looks in a row, and whether it is named."""

    looks: int = 0
    since: float = 0.0
    since_step: int = 0
    named: bool = False


@dataclass(slots=True)
class _Worker:
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seen: int = 0
    medians: _Medians | None = None
    judgments: dict[What, _Judgment] = field(default_factory=dict)
    reports: int = 0


class Slowness:
    """Feed it the events of a run (`add`), as they come."""

    def __init__(self) -> None:
        self._workers: dict[PeerId, _Worker] = {}
        self._hosts: dict[PeerId, str] = {}
        self._sent: dict[tuple[PeerId, PeerId], deque[tuple[int, float]]] = {}  # from, to -> bytes and seconds, by report
        self._told: dict[tuple[PeerId, PeerId], tuple[int, float]] = {}  # the sums of the newest report
        self._to: dict[PeerId, set[PeerId]] = {}
        self._from: dict[PeerId, set[PeerId]] = {}
        self._ordinary: _Medians | None = None  # of many workers
        self._looks = 0
        self._rates: dict[bool, tuple[int, float]] = {}  # of many workers: the look at which it was taken, and the middle

    def add(self, peer: PeerId, event: Mapping[str, Any]) -> list[Slow]:
        """Take an event, as in ``events.jsonl``. Returns the workers that are found slow now, or no longer."""
        self._hosts[peer] = event.get("host") or ""
        values, step = event["values"], event["step"]
        if event["kind"] == "step" and event["role"] == "worker" and isinstance(step, int) and "compute_s" in values:
            return self._step(peer, float(event["time"]), step, values)
        if event["kind"] == "links":
            self._links(peer, values.get("sent") or {})
            if event["role"] == "worker":
                return self._look_at_link(peer)
        if event["kind"] in ("lost", "finish") or (event["kind"] == "exit" and peer in self._workers):
            self._workers.pop(peer, None)  # it is compared with nobody, and nobody with it
        return []

    # Steps.

    def _step(self, peer: PeerId, time: float, step: int, values: Mapping[str, Any]) -> list[Slow]:
        worker = self._workers.setdefault(peer, _Worker())
        worker.seen += 1
        if worker.seen <= LEFT_OUT:
            return []
        compute_s, samples = float(values["compute_s"]), values.get("samples") or 0
        seconds, data_s = float(values.get("seconds") or 0.0), float(values.get("data_s") or 0.0)
        worker.steps.append(_Step(time, step, compute_s, compute_s / samples if samples else 0.0, data_s, seconds))
        if len(worker.steps) < WINDOW or worker.seen % STRIDE:
            return []
        computes, datas = (sorted(getattr(each, name) for each in worker.steps) for name in ("compute_s", "data_s"))
        worker.medians = _Medians(
            statistics.median(computes),
            statistics.median(each.sample_s for each in worker.steps),
            statistics.median(datas),
            statistics.median(each.seconds for each in worker.steps),
            computes[-WINDOW // 4],
            datas[-WINDOW // 4],
        )
        others = self._others(peer)
        if others is None:
            return []
        mine, matters = worker.medians, MATTERS * worker.medians.seconds
        device = _times(mine.compute_s, others.compute_s)
        if mine.sample_s and others.sample_s:  # parts of a batch may be uneven: neither more samples nor a few are slow
            device = min(device, _times(mine.sample_s, others.sample_s))
        if mine.compute_s - others.compute_s < matters or computes[WINDOW // 4] < others.high_compute_s:
            device = 1.0
        late_s, own_s = mine.data_s - others.data_s, others.compute_s + others.data_s
        unclear = late_s < matters or datas[WINDOW // 4] < others.high_data_s
        loader = 1.0 if unclear else _times(own_s + late_s, own_s)
        found: list[Slow] = []
        first = worker.steps[0]
        for what, factor in (("device", device), ("loader", loader)):
            found += self._judge(peer, what, factor, SLOW, FAST_AGAIN, (first.time, first.step))  # type: ignore[arg-type]
        return found

    def _others(self, peer: PeerId) -> _Medians | None:
        """The medians of the other workers' medians; ``None`` if there are none yet."""
        known = [worker.medians for name, worker in self._workers.items() if worker.medians is not None and name != peer]
        if len(known) > FEW:
            self._looks += 1
            if self._ordinary is not None and self._looks % (len(known) // 4):
                return self._ordinary
        if not known:
            return None
        self._ordinary = _Medians(*(statistics.median(getattr(each, name) for each in known) for name in _COLUMNS))
        return self._ordinary

    # Links.

    def _links(self, peer: PeerId, sent: Mapping[str, Any]) -> None:
        for to, (nbytes, seconds) in sent.items():
            before = self._told.get((peer, to), (0, 0.0))
            self._told[peer, to] = int(nbytes), float(seconds)
            if nbytes < before[0] or seconds < before[1]:  # another process in its place
                before = (0, 0.0)
            self._to.setdefault(peer, set()).add(to)
            self._from.setdefault(to, set()).add(peer)
            self._sent.setdefault((peer, to), deque(maxlen=REPORTS)).append((int(nbytes) - before[0], float(seconds) - before[1]))

    def _look_at_link(self, peer: PeerId) -> list[Slow]:
        worker = self._workers.get(peer)
        if worker is None or not worker.steps:
            return []
        worker.reports += 1
        if worker.reports <= REPORTS:
            return []
        self._looks += 1
        factors = []
        for out in (True, False):  # both ways, since its link also slows what a neighbour sends to it
            own, others = self._rate(peer, out), self._rate_of_others(peer, out)
            if own is not None and others is not None:
                factors.append(_times(others, own))
        if not factors:
            return []
        factor = math.prod(factors) ** (1 / len(factors)) if min(factors) >= LEAST_EACH_WAY else 1.0
        newest = worker.steps[-1]
        return self._judge(peer, "link", factor, SLOW_LINK, FAST_LINK, (newest.time, newest.step))

    def _rate_of_others(self, peer: PeerId, out: bool) -> float | None:
        """The middle of the other workers' rates; ``None`` if there are fewer than two: of two links nobody knows which it is."""
        at, rate = self._rates.get(out, (0, 0.0))
        if len(self._workers) > FEW and rate and self._looks - at < len(self._workers) // 4:
            return rate
        known = [each for other in self._workers if other != peer and (each := self._rate(other, out)) is not None]
        if len(known) < 2:
            return None
        self._rates[out] = self._looks, statistics.median(known)
        return self._rates[out][1]

    def _rate(self, peer: PeerId, out: bool) -> float | None:
        """Bytes a second to (or from) the other host that is reached best, while something is under way: a slow host makes what all
        others send to it slow, but nothing else. ``None`` if too little is sent."""
        best, host = None, self._hosts.get(peer)
        for other in (self._to if out else self._from).get(peer, ()):
            if other in self._hosts and self._hosts[other] != host:
                reports = self._sent[(peer, other) if out else (other, peer)]
                nbytes, seconds = sum(each for each, _ in reports), sum(each for _, each in reports)
                if nbytes >= LEAST_BYTES and seconds > 0:
                    best = max(best or 0.0, nbytes / seconds)
        return best

    def _judge(self, peer: PeerId, what: What, factor: float, slow: float, fast: float, began: tuple[float, int]) -> list[Slow]:
        """Count looks in a row that agree, and say what has changed."""
        judgment = self._workers[peer].judgments.setdefault(what, _Judgment())
        found = factor < fast if judgment.named else factor >= slow
        if not found:
            judgment.looks = 0
            return []
        if not judgment.named and not judgment.looks:
            judgment.since, judgment.since_step = began
        judgment.looks += 1
        if judgment.looks < TIMES:
            return []
        judgment.looks, judgment.named = 0, not judgment.named
        return [Slow(peer, what, factor, judgment.since, judgment.since_step, over=not judgment.named)]


def _times(mine: float, others: float) -> float:
    """How many times as much it is; 1 if there is nothing to compare with."""
    return mine / others if others > 0 else 1.0
