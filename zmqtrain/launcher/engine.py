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
from zmqtrain.wire.payload import Value

GROUP = "zmqtrain.engines"
#: The words of the command that starts an agent, after Python's own. ``-P``, as for all processes that the runtime starts: a file
#: in the current folder that is named like a module of Python's (``select.py``) must not take its place.
AGENT = ("-P", "-m", "zmqtrain", "agent")
#: The exit code of an agent of which only the end is known.
UNKNOWN_EXIT = 255


@runtime_checkable
class Handle(Protocol):
    """An agent that an engine has started."""

    async def wait(self) -> int:
        """Wait for its end and return its exit code (negative for a signal). May be called again."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Starts one agent per host."""

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        """Start ``command`` on the host with these variables added. ``environ`` holds secrets: never show it, and never put it on
        a command line. The command's first word is the Python of this machine; another host may have a different one."""
        ...

    async def stop(self, handle: Handle, grace: float) -> None:
        """Ask the agent to end, and kill it after ``grace`` seconds (0: at once). Returns when it has ended."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The run, as a `RemoteEngine` gets it."""

    topology: Topology
    hosts: tuple[Host, ...]
    """The hosts that have roles."""
    coordinators: Mapping[str, str]
    """The address of the coordinator's endpoint for each host, by host name."""
    folder: Path
    """The folder in which the user launches; relative paths begin there."""
    directory: Path
    """The run directory, on this machine."""
    script: str | None
    """The script that workers run, as the user named it."""
    timeouts: Timeouts
    say: Callable[[str], None]
    """Prints a line for the user."""
    log: Callable[[str, str], None]
    """``log(host, text)`` takes lines that a host's agent itself has printed."""
    agents: bool = True
    """Whether agents will be started, which fork roles. ``False``: probes, which check the hosts and measure."""


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine whose hosts are other machines. The launcher listens at all its addresses for them."""

    async def open(self, run: EngineRun) -> None:
        """Called before any agent is started: check that the hosts have what the run needs. Raises `HostsError` with all
        problems."""

    async def close(self) -> None:
        """Called after the last agent has been stopped, and also if `open` failed."""


@runtime_checkable
class LastingEngine(Engine, Protocol):
    """An engine whose agents can outlive the launcher, so that another one takes over."""

    def trace(self, handle: Handle) -> Value:
        """What another launcher needs to find the agent, as a plain value without secrets."""
        ...

    async def adopt(self, run: EngineRun, traces: Mapping[str, Value], sizes: Mapping[str, int]) -> Mapping[str, Handle]:
        """Called instead of `open` and `start`: find the agents that another launcher has started, by host name. Those that have
        ended are left out. ``sizes``: how far the files of the run directory had come.

        Raises `HostLostError` if hosts cannot be reached."""
        ...

    async def close(self) -> None:
        """Called after the last agent has been stopped, and also if `adopt` failed."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """The run, as a `GatheringEngine` gets it."""

    topology: Topology
    """The topology of the file, which may lack addresses, or hosts altogether."""
    directory: Path
    """The run directory, on this machine."""
    say: Callable[[str], None]
    """Prints a line for the user."""
    hosts: tuple[Host, ...] = ()
    """The hosts on which something will be started, if that is known already."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The hosts that a `GatheringEngine` has found."""

    topology: Topology
    """The topology with the actual hosts."""
    towards: Mapping[str, str]
    """The address of this machine for each host, by host name. Empty: all hosts are this machine, and the coordinator's endpoint
    has an address that they reach."""
    token: str | None = None
    """The run's token, if it follows from a secret of the engine; ``None``: the launcher chooses one."""
    port: int = 0
    """The coordinator's port; 0: any free port."""
    host: str | None = None
    """The address at which the coordinator listens; ``None``: what ``towards`` needs."""
    shape: Callable[[NetSettings], NetSettings] | None = None
    """Changes the settings of the coordinator's endpoint, if the network between the hosts is emulated."""
    told: Topology | None = None
    """The topology for the roles, if it differs: emulated hosts are on this machine."""
    said: str = ""
    """A line about the hosts, for the user."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Values about the hosts for the run's summary."""


@runtime_checkable
class GatheringEngine(RemoteEngine, Protocol):
    """An engine that finds out which machines the hosts are: they join by themselves, or a cluster provides them."""

    async def gather(self, gathering: Gathering) -> Gathered:
        """Find the hosts. Called first, even before roles are placed on hosts. `close` is called also if this fails."""
        ...


#: The engines of this package: module and class. A module is imported when its engine is needed.
BUILT_IN = {
    "local": "zmqtrain.launcher.local:LocalEngine",
    "ssh": "zmqtrain.launcher.ssh.engine:SshEngine",
    "slurm": "zmqtrain.launcher.slurm.engine:SlurmEngine",
    "environment": "zmqtrain.launcher.environment.engine:EnvironmentEngine",
    "kubernetes": "zmqtrain.launcher.environment.engine:EnvironmentEngine",
    "ray": "zmqtrain.launcher.ray.engine:RayEngine",
}


def make_engine(kind: str) -> Engine:
    """The engine of this name. Raises `UsageError` if there is none, or if a plug-in does not provide an engine."""
    if kind in BUILT_IN:
        module, _, name = BUILT_IN[kind].partition(":")
        engine: Engine = getattr(import_module(module), name)()
        return engine
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in found:
        known = [*BUILT_IN, *sorted(found)]
        near = did_you_mean(kind, known)
        hint = f"; did you mean {near!r}?" if near else "."
        raise UsageError(
            f"[engine] kind = {kind!r}: there is no such engine{hint} Choose one of {', '.join(known)}. Other packages can add "
            f"engines by the entry point group {GROUP}"
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
            f"{where} gives {type(made).__name__}, which is not an engine: it lacks {' and '.join(missing)}. The entry point "
            f"must name a class, or a function without arguments, that returns a zmqtrain.launcher.engine.Engine."
        )
    wrong = [name for name in ("start", "stop") if not iscoroutinefunction(getattr(made, name))]
    if wrong:
        raise EngineError(f"{where}: {' and '.join(wrong)} must be coroutines (async def)")
    return made


@contextmanager
def engine_faults(kind: str, doing: str) -> Iterator[None]:
    """Turn what an engine raises into an `EngineError`, unless it is a `ZmqTrainError` already. ``doing``: what the engine was
    asked to do."""
    try:
        yield
    except ZmqTrainError:
        raise
    except Exception as error:
        raise EngineError(f"the engine {kind!r} could not {doing}: {type(error).__name__}: {error}") from error
