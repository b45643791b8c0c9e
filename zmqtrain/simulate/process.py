"""A simulated operating-system process: tasks, timers and deliveries of the loop that stop and die together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: How many times a killed process is cancelled again if its clean-up waits; nothing that it does has an effect any more.
MOST_CANCELLATIONS = 50


class Callback(Protocol):
    """Something that the loop will call, now or later."""

    def cancel(self) -> None: ...


class Process:
    """What runs in it belongs to it: tasks and timers inherit it through a context variable.

    While it is paused nothing of it runs, as under SIGSTOP: its timers expire and messages queue up until it continues.
    """

    def __init__(self, name: str, host: str = "") -> None:
        self.name = name
        self.host = host
        self.paused = False
        self.killed = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Its unfinished tasks, oldest first."""
        self.held: deque[Callback] = deque()
        """Callbacks that have become due while it is paused."""
        self.waits: Callable[[], list[str]] | None = None
        """Describes what its endpoint waits for."""

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` as this process. Tasks that it makes and callbacks that it schedules belong to the process."""
        context = copy_context()
        context.run(_CURRENT.set, self)
        return context.run(function, *args, **kwargs)

    def pause(self) -> None:
        """Stop running, until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Continue with what has become due in the meantime, in order."""
        if self.paused:
            self.paused = False
            loop: Any = asyncio.get_running_loop()
            loop.put_back(self.held)
            self.held = deque()

    async def kill(self) -> None:
        """End all its tasks. Take it off the network first: a real process would not clean up, so its clean-up must have no
        effect."""
        self.killed = True
        self.resume()
        for _ in range(MOST_CANCELLATIONS):
            for task in list(self.tasks):
                task.cancel()
            if not self.tasks:
                return
            await asyncio.sleep(0)

    def __repr__(self) -> str:
        state = "killed" if self.killed else "paused" if self.paused else f"{len(self.tasks)} tasks"
        return f"Process({self.name}, {state})"


_CURRENT: ContextVar[Process | None] = ContextVar("zmqtrain-process", default=None)


def current_process() -> Process | None:
    """The process that is running now."""
    return _CURRENT.get()


#: Used by the loop, which looks it up in the contexts of callbacks.
PROCESS = _CURRENT
