"""How often a run has lost members, let hosts leave and let others in, and how long it took to go on: a fold of its events."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any


class Resizing:
    """Feed it events (`add`); `to_dict` gives the figures so far."""

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()  # kind of role -> how many
        self._leaving: set[str] = set()  # roles of hosts that were asked to leave
        self._drained: list[str] = []
        self._came = 0
        self._moved = 0
        self._since: dict[str, float] = {}  # what goes on without the lost ones -> when it was known that the first one is lost
        self._seconds: list[float] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event, as in ``events.jsonl``."""
        kind, values = event["kind"], event["values"]
        if kind == "drain":
            self._drained.append(str(values["host"]))
            self._leaving.update(values["roles"])
        elif kind == "join" and values.get("late"):
            self._came += 1
            self._leaving.discard(str(values["peer"]))
        elif kind == "moved":
            self._moved += 1
        elif kind == "lost" and (role := str(values["peer"]).partition("/")[0]) != "agent":
            if values["peer"] not in self._leaving:
                self._lost[role] += 1
                self._since.setdefault("took over" if role == "server" else "view", event["time"])
        elif kind in ("view", "took over") and (since := self._since.pop(kind, None)) is not None:
            self._seconds.append(max(0.0, event["time"] - since))  # not below 0 where hosts' clocks differ

    def to_dict(self) -> dict[str, Any] | None:
        """The figures for ``summary.json``; ``None`` if nobody was lost, has left or has come."""
        if not (self._lost or self._drained or self._came or self._moved):
            return None
        seconds = {"median": statistics.median(self._seconds), "max": max(self._seconds)} if self._seconds else None
        return {
            "lost": dict(sorted(self._lost.items())),
            "drained": self._drained,
            "came": self._came,
            "moved": self._moved,
            "went_on_s": seconds,
        }
