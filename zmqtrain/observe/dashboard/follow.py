"""Follows a run's directory: reads what has been added since the last look."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zmqtrain.observe.dashboard.state import Json, RunState
from zmqtrain.observe.run_directory import log_name, training_of
from zmqtrain.topology.ranges import expand

#: Bytes that one look reads at most, so that the first look at a long run gives something to see soon.
MOST_READ = 8 << 20
#: Bytes of a log's end that the page gets first.
LOG_TAIL = 64 << 10


class Followed:
    """A run that somebody looks at. May be used in any thread; a look at the file is made by one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._training = training_of(path)
        self._state = RunState()
        self._offset = 0
        self._part = b""
        self.broken = 0
        """Lines that could not be read."""
        self._begin()

    def _begin(self) -> None:
        self.config = read_topology(self._training)
        compute = self.config.get("compute") or {}
        size = compute.get("group_size")
        self._state = RunState(group_size=size if isinstance(size, int) else 1)
        self._offset, self._part, self.broken = 0, b"", 0

    def look(self) -> bool:
        """Read what is new, up to a limit. Returns whether there is more."""
        with self._lock:
            training = training_of(self.path)
            file = training / "events.jsonl"
            try:
                size = file.stat().st_size
            except OSError:
                return False
            if training != self._training or size < self._offset:
                self._training = training
                self._begin()
            if self._state.version == 0:
                self._begin()  # the hosts, and with them the groups, may have become known since
            with file.open("rb") as events:
                events.seek(self._offset)
                data = events.read(MOST_READ)
            self._offset += len(data)
            *lines, self._part = (self._part + data).split(b"\n")
            for line in lines:
                self._take(line)
            return self._offset < size

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            self._state.add(event)
        except (ValueError, TypeError, AttributeError, KeyError):
            self.broken += 1

    @property
    def version(self) -> tuple[str, int]:
        """Changes when there is something new."""
        return str(self._training), self._state.version

    def to_dict(self) -> Json:
        with self._lock:
            compute, job = self.config.get("compute") or {}, self.config.get("job") or {}
            exchange = self.config.get("exchange") or {}
            about = {
                "name": self.path.name,
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
        return sorted(file.stem.replace("-", "/", 1) for file in (self._training / "logs").glob("*.log"))

    def log(self, role: str, start: int | None) -> Json | None:
        """The log of a role from byte ``start`` on, or its end; ``None`` if it has none."""
        if role not in self.logs():
            return None
        with (self._training / "logs" / f"{log_name(role)}.log").open("rb") as file:
            size = file.seek(0, 2)
            begin = max(0, size - LOG_TAIL) if start is None or start > size else max(start, size - MOST_READ)
            file.seek(begin)
            data = file.read()
        return {"text": data.decode(errors="replace"), "next": begin + len(data)}


def seen(run: Followed, state_of: Callable[[Path], Json]) -> Json:
    """A look at a run: its figures, its ``status`` (`state_of_run`'s row), and whether it is still ``reading`` its events."""
    status = state_of(run.path)  # before the events: what the run wrote at its end is read, too
    reading = run.look()
    return {**run.to_dict(), "status": status, "reading": reading}


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
