"""Engines start one agent per host. Plug-ins register under the entry point group ``zmqtrain.engines``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Protocol, runtime_checkable

from zmqtrain.errors import EngineError, UsageError, ZmqTrainError
from zmqtrain.net.settings import NetSettings
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.topology.timeouts import Timeouts

GROUP = "zmqtrain.engines"


@runtime_checkable
class Handle(Protocol):
    """An agent that an engine has started."""

    async def wait(self) -> int:
        """Its exit code (negative for a signal), once it has ended. May be called again."""
        ...


@runtime_checkable
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
    timeouts: Timeouts
    say: Callable[[str], None]
    """Tell the person a line."""
    log: Callable[[str, str], None]
    """``log(host, text)``: lines that a host's agent itself has printed."""
    agents: bool = True
    """Whether agents will be started, which fork roles. ``False``: processes that look at the hosts and measure."""


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine whose hosts are other machines. The launcher listens at all its addresses for them."""

    async def open(self, run: EngineRun) -> None:
        """Before any agent is started: see that the hosts have what the run needs. Raises `HostsError` with all that is missing."""

    async def close(self) -> None:
        """After the last agent has been stopped, also where `open` failed."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """What a `GatheringEngine` is told."""

    topology: Topology
    """As the file has it: without addresses, or without hosts, where it leaves them out."""
    directory: Path
    """The run directory, on this machine."""
    say: Callable[[str], None]
    """Tell the person a line."""
    hosts: tuple[Host, ...] = ()
    """Those on which something will be started, where that is known already."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The hosts are known."""

    topology: Topology
    """With the hosts as they are."""
    towards: Mapping[str, str]
    """Where each host, by its name, reaches this machine. Empty: all hosts are this machine, and the coordinator's endpoint has an
    address that they reach."""
    token: str | None = None
    """The run's token, where the engine's own secret decides it; ``None``: any will do."""
    port: int = 0
    """The coordinator's port; 0: any free one."""
    host: str | None = None
    """The address at which the coordinator listens; ``None``: what ``towards`` needs."""
    shape: Callable[[NetSettings], NetSettings] | None = None
    """Changes what the coordinator's endpoint runs by, where the network between the hosts is emulated."""
    told: Topology | None = None
    """The topology as roles are told it, where that is another: emulated hosts are on this machine."""
    said: str = ""
    """A line about the hosts, for the person."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What of that belongs into the summary."""


@runtime_checkable
class GatheringEngine(RemoteEngine, Protocol):
    """An engine that finds out which machines the hosts are: they come by themselves, or somebody gives them."""

    async def gather(self, gathering: Gathering) -> Gathered:
        """Before all else, even before roles are placed on hosts. `close` is called also where this has failed."""
        ...


#: Engines of ours: module and class. Each module is imported when its engine is asked for.
BUILT_IN = {
    "local": "zmqtrain.launcher.local:LocalEngine",
    "ssh": "zmqtrain.launcher.ssh.engine:SshEngine",
    "slurm": "zmqtrain.launcher.slurm.engine:SlurmEngine",
    "environment": "zmqtrain.launcher.environment.engine:EnvironmentEngine",
    "kubernetes": "zmqtrain.launcher.environment.engine:EnvironmentEngine",
    "ray": "zmqtrain.launcher.ray.engine:RayEngine",
}


def make_engine(kind: str) -> Engine:
    """The engine of this name. Raises `UsageError` where there is none, or where a plug-in's is no engine."""
    if kind in BUILT_IN:
        module, _, name = BUILT_IN[kind].partition(":")
        engine: Engine = getattr(import_module(module), name)()
        return engine
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in found:
        known = [*BUILT_IN, *sorted(found)]
        near = did_you_mean(kind, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UsageError(
            f"[engine] kind = {kind!r}: there is no such engine{hint} Known: {', '.join(known)}. "
            f"A package brings its own by the entry point group {GROUP}"
        )
    return _plugged_in(found[kind])


def _plugged_in(entry: EntryPoint) -> Engine:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    where = f"[engine] kind = {entry.name!r}: the plug-in {entry.value}{package}"
    try:
        made = entry.load()()
    except ZmqTrainError:
        raise
    except Exception as error:
        raise EngineError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(made, Engine):
        missing = [name for name in ("start", "stop") if not callable(getattr(made, name, None))]
        raise EngineError(
            f"{where} gives {type(made).__name__}, which is no engine: it lacks {' and '.join(missing)}. The entry point names a "
            "class, or a function without arguments, that gives a zmqtrain.launcher.engine.Engine"
        )
    wrong = [name for name in ("start", "stop") if not iscoroutinefunction(getattr(made, name))]
    if wrong:
        raise EngineError(f"{where}: {' and '.join(wrong)} must be coroutines (async def)")
    return made


@contextmanager
def engine_faults(kind: str, doing: str) -> Iterator[None]:
    """What an engine raises comes out as an `EngineError`, unless it is an error of ours already. ``doing``: what it was to do."""
    try:
        yield
    except ZmqTrainError:
        raise
    except Exception as error:
        raise EngineError(f"the engine {kind!r} could not {doing}: {type(error).__name__}: {error}") from error
