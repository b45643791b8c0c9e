"""What happens, as data: events and spans that roles record and ``observe/`` writes down.

At the bottom of the import order, since every role records and only ``observe/`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

EventValue = str | int | float | bool | None | list["EventValue"] | dict[str, "EventValue"]


class Recorder(Protocol):
    """Takes events and spans of one role. May be called from the loop's thread and from the compute thread."""

    def event(self, kind: str, /, *, step: int | None = None, **values: EventValue) -> None:
        """Record that ``kind`` happened now."""

    def span(self, name: str, category: str, /, *, step: int | None = None) -> AbstractContextManager[object]:
        """Record how long a block took. ``category``: compute, send, receive or wait (a row each in ``trace.json``)."""
        ...

    def add_span(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        *,
        step: int | None = None,
        values: Mapping[str, EventValue] | None = None,
    ) -> None:
        """Record a span whose ends (the loop's clock, in seconds) are known already."""

    def audit(self, what: str, /, **values: object) -> None:
        """State a fact for the auditor of a simulation. Outside simulations the call has no effect."""


class NullRecorder:
    """A recorder that records nothing."""

    def event(self, kind: str, /, *, step: int | None = None, **values: EventValue) -> None:
        return None

    def span(self, name: str, category: str, /, *, step: int | None = None) -> AbstractContextManager[object]:
        return nullcontext()

    def add_span(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        *,
        step: int | None = None,
        values: Mapping[str, EventValue] | None = None,
    ) -> None:
        return None

    def audit(self, what: str, /, **values: object) -> None:
        return None
