"""What a sink is: it takes a run's figures as they come. `[observe] to` names the sinks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from zmqtrain.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a sink learns about the run before it begins."""

    name: str
    """The job's name."""
    directory: Path
    """The run directory, whose name identifies the run."""
    world: str
    """real, emulated or simulated."""
    config: Mapping[str, Any]
    """The resolved topology as plain values."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The sink's own settings: its table in ``[observe.options]``."""

    def checked_options(self, sink: str, known: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
        """The options, if the sink ``known``s their names and types. Raises `UsageError`."""
        for key, value in self.options.items():
            if key not in known:
                which = (
                    f"there is no option {key!r}; it has {', '.join(known)}" if known else f"it has no options, but {key!r} is set"
                )
                raise UsageError(f"[observe.options] {sink}: {which}")
            if isinstance(value, bool) or not isinstance(value, known[key]):
                raise UsageError(f"[observe.options] {sink}: {key} = {value!r} has the wrong type")
        return dict(self.options)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that belong to one step, such as ``train/loss`` or ``eval/accuracy``."""

    step: int
    time_s: float
    """Seconds since the epoch."""
    values: Mapping[str, float]


@runtime_checkable
class Sink(Protocol):
    """Takes a run's figures. All methods are called in one thread, which is the sink's own, in the launcher's process.

    They may block and fail: training goes on. A sink that raises is not called again, and the user is told once.
    """

    def begin(self, run: RunFacts) -> None:
        """Called first, before anything of the run is started. What it raises prevents the run: `UsageError` for settings that
        cannot work."""

    def events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take events, each as in ``events.jsonl``, for sinks that want more than figures."""

    def figures(self, rows: Sequence[Figures]) -> None:
        """Take the figures of some steps: means over all workers. Steps are in order, each comes once, and evaluations come in
        between."""

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The run has ended. ``status``: done, failed, ...; ``summary``: as in ``summary.json``."""


class QuietSink:
    """A sink that does nothing; sinks override what they need."""

    def begin(self, run: RunFacts) -> None:
        return None

    def events(self, events: Sequence[Mapping[str, Any]]) -> None:
        return None

    def figures(self, rows: Sequence[Figures]) -> None:
        return None

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        return None
