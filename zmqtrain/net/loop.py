"""The event loop that our processes run: uvloop where it is installed, with a clock that is exact.

A *dilated* loop runs in slow motion: its clock advances one second in ``factor`` real ones, and its timers wait accordingly.
Whatever goes by the loop's time (time-outs, modelled devices, shaped links, what is recorded) then is slow by one factor, without
knowing, and what it reports is as if nothing were. A machine that is too small for a cluster can so emulate it all the same.
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
    """Real seconds for one of the loop's."""
    since_s: float = 0.0
    """When, in seconds since the epoch, the run's calendar began to be slow."""

    @classmethod
    def beginning_now(cls, factor: float) -> Dilation:
        """A dilation by ``factor``, from this moment on."""
        return cls(factor, time.time())

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Dilation:
        """What `to_environ` gave; none where nothing is set. Raises `UsageError` for a factor below 1, or no number."""
        variables = os.environ if environ is None else environ
        text = variables.get(DILATION) or "1"
        since = variables.get(DILATED_SINCE) or "0"
        try:
            dilation = cls(float(text), float(since))
        except ValueError as error:
            raise UsageError(f"{DILATION} is {text!r} and {DILATED_SINCE} {since!r}; both must be numbers") from error
        if not 1 <= dilation.factor <= 1e6:
            raise UsageError(f"{DILATION} is {text!r}; it must be 1 or more")
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
    """Real seconds per second of the loop: the factor for a time that is passed to code outside the loop."""
    factor: float = getattr(loop, "dilation", 1.0)
    return factor


def new_event_loop(dilation: Dilation | None = None) -> asyncio.AbstractEventLoop:
    """A new loop, not running; ``dilation``: by default what the environment says.

    uvloop's own clock counts whole milliseconds and stands still while a callback runs; traces and step times need more, and the
    compute thread reads the clock, too. `time.monotonic` is the same clock, read anew.
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
        # asyncio.sleep, timeout, wait and wait_for come through these three; uvloop's own times (of name look-ups, of closing
        # pipes) do not, and stay real.
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
    """asyncio's own loop in slow motion, for where uvloop is not. Its timers all go by `time` already."""

    def __init__(self, dilation: Dilation) -> None:
        self.dilation = dilation.factor
        self.world = DilatedWorld(dilation)
        super().__init__(_PatientSelector(dilation.factor))

    def time(self) -> float:
        return time.monotonic() / self.dilation


def run(main: Coroutine[Any, Any, T], *, dilation: Dilation | None = None) -> T:
    """Run a coroutine to its end in a loop of its own, as `asyncio.run` does; ``dilation`` as for `new_event_loop`."""
    with asyncio.Runner(loop_factory=lambda: new_event_loop(dilation)) as runner:
        return runner.run(main)
