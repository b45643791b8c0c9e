"""How far a run is, and how long it takes yet. Sans-IO: events come with their time, on whatever clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: A worker's pace is taken from this many of its newest marks, at least this many seconds apart: the newest minute or, where
#: steps take longer, the newest steps. Evaluations and checkpoints are in it, as they are in what is to come.
MARKS, APART_S = 60, 1.0
#: What ends a worker's part in the run. One that exits after it has left has done its part.
_ENDS = {"leave": "left", "lost": "lost", "failed": "lost", "exit": "lost"}


class Progress:
    """Feed it a run's events (`add`)."""

    def __init__(self) -> None:
        self.planned: int | None = None
        """The steps of the run; ``None``: not known, or not known yet."""
        self._workers: dict[int, _Worker] = {}

    def add(self, event: Mapping[str, Any], now: float) -> None:
        """Take an event, or a line that stands for many. What is not about a worker's steps is left out."""
        kind, rank, step, values = event.get("kind"), event.get("rank"), event.get("step"), event.get("values") or {}
        if event.get("role") != "worker" or not isinstance(rank, int):
            return
        if kind in _ENDS and rank in self._workers:
            worker = self._workers[rank]
            worker.state = _ENDS[kind] if worker.state == "there" else worker.state
        elif kind in ("join", "start"):
            self._workers.pop(rank, None)  # one that comes back may begin elsewhere
        if kind == "start" and isinstance(values.get("steps"), int):
            self.planned = values["steps"]
        if isinstance(step, int) and (kind == "step" or (kind == "sums" and values.get("of") == "step")):
            self._workers.setdefault(rank, _Worker()).add(step + 1, now)

    def done(self) -> tuple[int, int] | None:
        """The steps that the slowest and the furthest worker have done, of those in the run; when none is there any more, of those
        that were there to the end; ``None``: there are no steps yet."""
        done = [worker.done for worker in self._counted()]
        return (min(done), max(done)) if done else None

    def left_s(self) -> float | None:
        """Seconds until the last worker has done all steps, at the pace of its newest steps; ``None``: nobody knows yet."""
        if self.planned is None:
            return None
        left = [worker.left_s(self.planned) for worker in self._counted()]
        known = [seconds for seconds in left if seconds is not None]
        return max(known) if known and len(known) == len(left) else None

    def to_dict(self) -> dict[str, Any]:
        """The progress as plain values: ``planned``, ``done`` (`done`) and ``left_s``."""
        return {"planned": self.planned, "done": self.done(), "left_s": self.left_s()}

    def _counted(self) -> list[_Worker]:
        workers = list(self._workers.values())
        for state in ("there", "left"):
            if found := [worker for worker in workers if worker.state == state]:
                return found
        return workers


@dataclass(slots=True)
class _Worker:
    done: int = 0
    at: float = 0.0
    state: str = "there"
    marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MARKS))

    def add(self, done: int, now: float) -> None:
        self.done, self.at = max(self.done, done), now
        if self.marks and now == self.marks[-1][1]:  # they have arrived together
            self.marks[-1] = (self.done, now)
        elif not self.marks or now - self.marks[-1][1] >= APART_S:
            self.marks.append((self.done, now))

    def left_s(self, planned: int) -> float | None:
        if self.done >= planned:
            return 0.0
        done, at = self.marks[0]
        return (planned - self.done) * (self.at - at) / (self.done - done) if self.done > done and self.at - at >= APART_S else None
