"""Follows a run's directory: reads what has been added since the last look."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zmqtrain.observe.dashboard.search import ROLE as SEARCH
from zmqtrain.observe.dashboard.search import SearchState
from zmqtrain.observe.dashboard.state import Json, RunState
from zmqtrain.observe.run_directory import began, log_name, runs_of, training_of
from zmqtrain.topology.ranges import expand

#: Bytes that one look reads at most, so that the first look at a long run gives something to see soon.
MOST_READ = 8 << 20
#: Bytes of a log's end that the page gets first.
LOG_TAIL = 64 << 10


class Followed:
    """A run that is being shown. May be used in any thread; one thread at a time reads the file.

    Of a search (`zmqtrain.experiment`) the trials and decisions are in its own events, and what is shown besides is the trial that
    trains now, or else the job's training: a run directory of its own inside the search's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._search = SearchState()
        self._own = _Lines(self.path)
        self._shown = self._own
        self._read_topology()
        self._state = RunState(group_size=self._group_size())
        self.broken = 0
        """Lines that could not be read."""
        self._taken = 0

    def _read_topology(self) -> None:
        self.config = read_topology(self._shown.folder)

    def _group_size(self) -> int:
        size = (self.config.get("compute") or {}).get("group_size")
        return size if isinstance(size, int) else 1

    def look(self) -> bool:
        """Read what is new, up to a limit. Returns whether there is more."""
        with self._lock:
            if self._own.shorter():
                self._begin()
            if self._state.version == 0:  # the hosts, and with them the groups, may have become known since
                self._read_topology()
                self._state = RunState(group_size=self._group_size(), before=self._state)
            more = self._read(self._own)
            trains = self._training()
            if trains != self._shown.folder or self._shown.shorter():
                self._shown = self._own if trains == self.path else _Lines(trains)
                self._read_topology()
                self._state = RunState(group_size=self._group_size(), before=self._state)
            return (self._shown is not self._own and self._read(self._shown)) or more

    def _training(self) -> Path:
        """The folder of what trains now."""
        training = training_of(self.path)
        if self._search.newest is None or (training != self.path and not self._search.trying):
            return training
        trial = self.path / self._search.newest
        return trial if (trial / "topology.toml").exists() else training

    def _read(self, lines: _Lines) -> bool:
        for line in lines.new():
            try:
                event = json.loads(line)
                self._state.add(event)
                if event.get("role") == SEARCH:
                    self._search.add(event)
                self._taken += 1
            except (ValueError, TypeError, AttributeError, KeyError):
                self.broken += 1
        return lines.more

    @property
    def version(self) -> tuple[str, int]:
        """Changes when there is something new."""
        return str(self._shown.folder), self._taken

    def to_dict(self) -> Json:
        with self._lock:
            compute, job = self.config.get("compute") or {}, self.config.get("job") or {}
            exchange = self.config.get("exchange") or {}
            trial = self._shown.folder if self._search.newest and self._shown is not self._own else None
            about = {
                "name": self.path.name,
                "trial": trial and "/".join(trial.parts[-2:]),
                "search": self._search.to_dict(),
                "job": job.get("name"),
                "groups": compute.get("groups"),
                "group_size": compute.get("group_size"),
                "exchange": exchange.get("kind"),
                "hosts": [name for host in self.config.get("hosts") or [] for name in _names(str(host.get("name")))],
                "broken": self.broken,
                "logs": self.logs(),
            }
            return {**about, **self._state.to_dict()}

    def feed(self, after: int) -> list[Json]:
        """The events for people, except those up to number ``after``."""
        with self._lock:
            return self._state.feed(after)

    def logs(self) -> list[str]:
        """The roles that have a log."""
        return sorted(file.stem.replace("-", "/", 1) for file in (self._shown.folder / "logs").glob("*.log"))

    def log(self, role: str, start: int | None) -> Json | None:
        """The log of a role from byte ``start`` on, or its end; ``None`` if it has none."""
        if role not in self.logs():
            return None
        with (self._shown.folder / "logs" / f"{log_name(role)}.log").open("rb") as file:
            size = file.seek(0, 2)
            begin = max(0, size - LOG_TAIL) if start is None or start > size else max(start, size - MOST_READ)
            file.seek(begin)
            data = file.read()
        return {"text": data.decode(errors="replace"), "next": begin + len(data)}


class _Lines:
    """The lines of a folder's events that have been added since the last look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.more = False
        """Whether the last look has left something."""
        self._offset, self._part = 0, b""

    def _size(self) -> int:
        try:
            return (self.folder / "events.jsonl").stat().st_size
        except OSError:
            return 0

    def shorter(self) -> bool:
        """Whether the file is another one than before."""
        return self._size() < self._offset

    def new(self) -> list[bytes]:
        """The next complete lines, up to a limit."""
        size = self._size()
        if size <= self._offset:
            self.more = False
            return []
        with (self.folder / "events.jsonl").open("rb") as events:
            events.seek(self._offset)
            data = events.read(MOST_READ)
        self._offset += len(data)
        self.more = self._offset < size
        *lines, self._part = (self._part + data).split(b"\n")
        return lines


def seen(run: Followed, state_of: Callable[[Path], Json]) -> Json:
    """A look at a run: its figures, its ``status`` (`state_of_run`'s row), and whether it is still ``reading`` its events."""
    status = state_of(run.path)  # before the events: what the run wrote at its end is read, too
    reading = run.look()
    return {**run.to_dict(), "status": status, "reading": reading}


def listed(folder: Path, state_of: Callable[[Path], Json]) -> list[Json]:
    """The runs of a folder, the newest first: their names, and of what ``state_of`` says the status and the results."""
    paths = sorted(runs_of(folder), key=began, reverse=True)
    states = [(path.name, state_of(path)) for path in paths]
    return [
        {"name": name, **{key: state.get(key) for key in ("status", "steps", "seconds", "eval", "loss")}} for name, state in states
    ]


def _names(host: str) -> tuple[str, ...]:
    """The hosts that a range of names stands for."""
    try:
        return expand(host)
    except ValueError:
        return (host,)


def read_topology(path: Path) -> dict[str, Any]:
    """The run's topology as plain values; empty if it cannot be read."""
    try:
        return tomllib.loads((path / "topology.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
