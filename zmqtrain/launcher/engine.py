"""Engines start one agent per host. Plug-ins register under the entry point group ``zmqtrain.engines``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from zmqtrain.errors import UsageError
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.timeouts import Ladder

if TYPE_CHECKING:
    from zmqtrain.launcher.nursery import Nursery

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
        a command line. The command's first word is this machine's Python; a host of its own may have another."""
        ...

    async def stop(self, handle: Handle, grace: float) -> None:
        """End the agent: ask, and after ``grace`` seconds force (0: at once). Returns when it has ended."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What a `RemoteEngine` is told of the run."""

    topology: Topology
    hosts: tuple[Host, ...]
    """Those that have roles."""
    coordinators: Mapping[str, str]
    """Where each host, by its name, reaches the coordinator: the endpoint's address."""
    folder: Path
    """The folder that the person launches in; relative paths begin there."""
    directory: Path
    """The run directory, on this machine."""
    script: str | None
    """The script that workers run, as the person named it."""
    ladder: Ladder
    say: Callable[[str], None]
    """Tell the person a line."""
    log: Callable[[str, str], None]
    """``log(host, text)``: lines that a host's agent itself has printed."""


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine whose hosts are other machines. The launcher listens at all its addresses for them."""

    async def open(self, run: EngineRun) -> None:
        """Before any agent is started: see that the hosts have what the run needs. Raises `HostsError` with all that is missing."""

    async def close(self) -> None:
        """After the last agent has been stopped, also where `open` failed."""


def make_engine(kind: str, nursery: Nursery | None = None) -> Engine:
    """The engine of this name. Raises `UsageError` where there is none. ``nursery``: for agents on this machine."""
    if kind == "local":
        from zmqtrain.launcher.local import LocalEngine

        return LocalEngine(nursery)
    if kind == "ssh":
        from zmqtrain.launcher.ssh.engine import SshEngine

        return SshEngine()
    if kind == "slurm":
        from zmqtrain.launcher.slurm.engine import SlurmEngine

        return SlurmEngine()
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in found:
        raise UsageError(f"there is no engine {kind!r}; known: {', '.join(['local', 'ssh', 'slurm', *found])}")
    engine: Engine = found[kind].load()()
    return engine
