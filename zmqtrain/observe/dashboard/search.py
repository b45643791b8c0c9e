"""What a search for settings has tried and decided so far, for the page and the terminal: a fold of its events, of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

#: The role in the events of `zmqtrain tune` and of launches with ``groups = "auto"``.
ROLE = "tune"
#: The newest trials and decisions that are shown.
MOST_ROWS = 200


class SearchState:
    """Feed it the events with `ROLE` (`add`), then take `to_dict`."""

    def __init__(self) -> None:
        self._rows: deque[Json] = deque(maxlen=MOST_ROWS)
        self._now: Json | None = None
        self._trials = 0
        self.newest: Path | None = None
        """The folder of the newest trial, relative to the search's. Simulated trials have no events there."""

    @property
    def trying(self) -> bool:
        """Whether a trial is under way."""
        return self._now is not None

    def add(self, event: Mapping[str, Any]) -> None:
        """Take a line of ``events.jsonl``."""
        kind, values = str(event["kind"]), event["values"]
        row = {"what": kind, "strategy": values["strategy"], "reason": str(values["reason"])}
        if kind not in ("trial", "trial begins"):
            self._rows.append(row)
            return
        row |= {name: values[name] for name in ("number", "phase", "updates")}
        row |= {name: values["setting"][name] for name in ("groups", "momentum", "lr")}
        self.newest = Path(str(row["strategy"]), f"{row['number']:03d}")
        if kind == "trial begins":
            self._now = row
            return
        outcome = values["outcome"]
        self._rows.append(row | {name: outcome[name] for name in ("updates", "seconds", "first", "loss", "staleness")})
        self._now, self._trials = None, self._trials + 1

    def to_dict(self) -> Json | None:
        """As plain values: how many ``trials`` there were, the one that is under way (``now``), and the newest ``rows``. ``None``
        if there was no search."""
        if not self._rows and self._now is None:
            return None
        return {"trials": self._trials, "now": self._now, "rows": list(self._rows)}
