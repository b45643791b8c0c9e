"""The event loop of zmqtrain's processes: uvloop if it is installed, with a precise clock.

A *dilated* loop runs in slow motion: its clock advances one second in ``factor`` real ones, and its timers wait accordingly.
Everything that uses the loop's time (time-outs, modelled devices, shaped links, what is recorded) is then slowed by the same factor
without noticing it. In this way a machine that is too small for a cluster can still emulate it.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar

from zmqtrain.errors import UsageError
from zmqtrain.world import RealWorld

T = TypeVar("T")

DILATION = "ZMQTRAIN_DILATION"
DILATED_SINCE = "ZMQTRAIN_DILATED_SINCE"


@dataclass(frozen=True, slots=True)
class Dilation:
    """How slow a run is. The same in all its processes, so that their clocks agree."""

    factor: float = 1.0
    """Real seconds per second of the loop."""
    since_s: float = 0.0
    """When, in seconds since the epoch, the slow calendar of the run began."""

    @classmethod
    def beginning_now(cls, factor: float) -> Dilation:
        """A dilation by ``factor`` from this moment on."""
        return cls(factor, time.time())

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Dilation:
        """The dilation that `to_environ` returned; none if nothing is set. Raises `UsageError` for a factor that is invalid or
        below 1."""
        variables = os.environ if environ is None else environ
        text = variables.get(DILATION) or "1"
        since = variables.get(DILATED_SINCE) or "0"
        try:
            dilation = cls(float(text), float(since))
        except ValueError as error:
            raise UsageError(f"{DILATION} is {text!r} and {DILATED_SINCE} {since!r}; both must be numbers") from error
        if not 1 <= dilation.factor <= 1e6:
            raise UsageError(f"{DILATION} is {text!r}; it must be at least 1")
        return dilation

    def to_environ(self) -> dict[str, str]:
        """The dilation as environment variables, for processes of the same run."""
        return {} if self.factor == 1 else {DILATION: repr(self.factor), DILATED_SINCE: repr(self.since_s)}


class DilatedWorld(RealWorld):
    """This machine, with a calendar that is as slow as the loop's clock."""

    def __init__(self, dilation: Dilation) -> None:
        self._dilation = dilation

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        since = self._dilation.since_s
        return since + (super().wall_s() - since) / self._dilation.factor


def dilation_of(loop: asyncio.AbstractEventLoop) -> float:
    """Real seconds per second of the loop: the factor for times that are passed to code outside the loop."""
    factor: float = getattr(loop, "dilation", 1.0)
    return factor


def new_event_loop(dilation: Dilation | None = None) -> asyncio.AbstractEventLoop:
    """A new loop, not running. ``dilation``: by default what the environment says.

    uvloop's own clock counts whole milliseconds and stands still while a callback runs. Traces and step times need more precision,
    and the compute thread reads the clock, too. `time.monotonic` is the same clock, read each time.
    """
    slowness = Dilation.from_environ() if dilation is None else dilation
    factor = slowness.factor
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop() if factor == 1 else DilatedSelectorLoop(slowness)

    class Loop(uvloop.Loop):
        def time(self) -> float:
            return time.monotonic()

    if factor == 1:
        return Loop()

    class DilatedLoop(uvloop.Loop):
        # asyncio.sleep, timeout, wait and wait_for use these three methods. uvloop's internal times (for name look-ups, and to
        # close pipes) do not, and stay real.
        def __init__(self) -> None:
            self.dilation = factor
            self.world = DilatedWorld(slowness)

        def time(self) -> float:
            return time.monotonic() / factor

        def call_later(  # type: ignore[override]
            self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
        ) -> asyncio.TimerHandle:
            return super().call_later(delay * factor, callback, *args, context=context)

        def call_at(  # type: ignore[override]
            self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
        ) -> asyncio.TimerHandle:
            return super().call_later(when * factor - time.monotonic(), callback, *args, context=context)

    return DilatedLoop()


class _PatientSelector(selectors.DefaultSelector):
    """A selector that multiplies every waiting time by the dilation."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout * self._factor)


class DilatedSelectorLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop in slow motion, for systems without uvloop. All its timers already use `time`."""

    def __init__(self, dilation: Dilation) -> None:
        self.dilation = dilation.factor
        self.world = DilatedWorld(dilation)
        super().__init__(_PatientSelector(dilation.factor))

    def time(self) -> float:
        return time.monotonic() / self.dilation


def run(main: Coroutine[Any, Any, T], *, dilation: Dilation | None = None) -> T:
    """Run a coroutine to its end in a loop of its own, like `asyncio.run`; ``dilation`` as for `new_event_loop`."""
    with asyncio.Runner(loop_factory=lambda: new_event_loop(dilation)) as runner:
        return runner.run(main)
