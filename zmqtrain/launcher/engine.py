"""Engines start one agent per host. Plug-ins register under the entry point group ``zmqtrain.engines``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Protocol

from zmqtrain.errors import UsageError
from zmqtrain.topology.schema import Host

GROUP = "zmqtrain.engines"


class Handle(Protocol):
    """An agent that an engine has started."""

    async def wait(self) -> int:
        """Its exit code (negative for a signal), once it has ended. May be called again."""
        ...


class Engine(Protocol):
    """Starts one agent per host."""

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        """Start ``command`` on the host with these variables added. ``environ`` holds secrets: never show it, and never put it on
        a command line."""
        ...

    async def stop(self, handle: Handle, grace: float) -> None:
        """End the agent: ask, and after ``grace`` seconds force (0: at once). Returns when it has ended."""


def make_engine(kind: str) -> Engine:
    """The engine of this name. Raises `UsageError` where there is none."""
    if kind == "local":
        from zmqtrain.launcher.local import LocalEngine

        return LocalEngine()
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in found:
        raise UsageError(f"there is no engine {kind!r}; known: {', '.join(['local', *found])}")
    engine: Engine = found[kind].load()()
    return engine
