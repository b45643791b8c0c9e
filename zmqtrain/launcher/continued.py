"""A run whose launcher has died, and the launcher that takes its place (``zmqtrain launch --continue RUN``).

Its agents are alive, and train on alone for `[job] alone`. They know one address: the new launcher listens there, with the same
keys and token, and begins a new epoch. What it needs is in the run's journal (`zmqtrain.membership.journal`).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zmqtrain.errors import JournalError, PortInUseError
from zmqtrain.launcher.adopted import process_of
from zmqtrain.launcher.engine import UNKNOWN_EXIT, Engine, EngineRun, Gathered, Gathering, Handle, LastingEngine, make_engine
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.journal import NAME, JournalFile
from zmqtrain.membership.ledger import RUN
from zmqtrain.membership.state import State
from zmqtrain.net.address import split_address
from zmqtrain.net.curve import Identity
from zmqtrain.net.settings import NetSettings
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.topology.schema import Host
from zmqtrain.wire.payload import Value

#: Names in the ledger: how the run was launched, what has been started on each host, and what the names of files begin with (their
#: values say how far each has come).
LAUNCH, HOSTS, FILE = "launch", "hosts", "file/"


class NothingLeftError(JournalError):
    """No process of the run is left that could be taken over."""


def nothing_left(path: Path) -> NothingLeftError:
    """The error for a run of which no agent is left."""
    return NothingLeftError(
        f"{path} cannot be taken over: none of its agents is left. `zmqtrain launch FILE --resume {path}` continues from its "
        "newest checkpoint"
    )


class Leadership:
    """A launcher's hold on a run: its journal, which it keeps up to date."""

    def __init__(self, journal: JournalFile) -> None:
        self.journal = journal
        self._sizes: dict[str, int] = {}

    @classmethod
    def begin(cls, directory: RunDirectory, description: RunDescription, *, began: float) -> Leadership:
        """Create the journal of a new run. Raises `JournalError` and ``OSError``."""
        launch: Value = {"epoch": 1, "began": began, "description": description.to_value()}
        return cls(JournalFile.create(directory.path / NAME, {LAUNCH: launch}))

    @classmethod
    def take_over(cls, path: Path) -> Leadership:
        """Of a run in this directory whose launcher is gone.

        Raises `JournalError` if it is not, or if there is nothing to take over."""
        if not (path / NAME).exists():
            raise NothingLeftError(
                f"{path} cannot be taken over: it has ended, or its processes have ended with their launcher (those of the ssh "
                f"engine, and of --detach with the local engine, live on for [job] alone). `zmqtrain launch FILE --resume {path}` "
                "continues from its newest checkpoint"
            )
        journal = JournalFile.take_over(path / NAME)
        try:
            if RUN not in journal.ledger or HOSTS not in journal.ledger:
                raise NothingLeftError(f"{path} cannot be taken over: its launcher died before all had joined. Launch it anew")
        except BaseException:
            journal.close()
            raise
        return cls(journal)

    @property
    def has_ended(self) -> bool:
        """Whether the run had ended, and only its summary is missing."""
        run: Any = self.journal.ledger[RUN]
        return State(run[0]) is State.ENDED

    @property
    def launch(self) -> dict[str, Any]:
        """How the run was launched."""
        value = self.journal.ledger[LAUNCH]
        assert isinstance(value, dict)
        return value

    @property
    def epoch(self) -> int:
        """The number of this leadership."""
        return int(self.launch["epoch"])

    @property
    def continues(self) -> bool:
        """Whether another launcher has led the run before."""
        return self.epoch > 1

    def begin_epoch(self) -> None:
        """Record that this launcher leads the run from now on, in an epoch of its own. Raises ``OSError``."""
        self.journal.begin_epoch({LAUNCH: {**self.launch, "epoch": self.epoch + 1}})

    def description(self) -> RunDescription:
        """The run as its first launcher described it."""
        return RunDescription.from_value(self.launch["description"])

    def sizes(self) -> dict[str, int]:
        """How far the files of the run directory had come."""
        return {
            name.removeprefix(FILE): size
            for name, size in self.journal.ledger.items()
            if name.startswith(FILE) and isinstance(size, int)
        }

    def follow(self, directory: RunDirectory) -> None:
        """Keep in the journal how far the files come."""
        self._sizes = self.sizes()

        def note() -> None:
            sizes = directory.sizes()
            changed: dict[str, Value] = {f"{FILE}{name}": size for name, size in sizes.items() if self._sizes.get(name) != size}
            self._sizes.update(sizes)
            self.journal.stage(changed)
            if self.journal.failure:
                directory.failed(NAME, f"{self.journal.failure}; the run cannot be taken over by another launcher")

        directory.on_flush = note

    def settings(self, settings: NetSettings) -> NetSettings:
        """The settings of the coordinator's endpoint: with this epoch, and at the address that members know, if there are any."""
        launch = self.launch
        settings = replace(settings, epoch=self.epoch)
        if "address" not in launch:
            return settings
        control, bulk = (int(each.rpartition(":")[2]) for each in split_address(launch["address"]))
        secret = launch["secret"]
        identity = None if secret is None else Identity.coordinator(launch["token"], bytes.fromhex(secret))
        return replace(settings, host=launch["host"], port=control, bulk_port=bulk, ports=None, identity=identity)

    def listens(self, address: str, token: str, settings: NetSettings) -> None:
        """Keep where and how the members find the coordinator."""
        secret = None if settings.identity is None else settings.identity.secret.hex()
        kept = {"address": address, "token": token, "host": settings.host, "secret": secret}
        self.journal.write({LAUNCH: {**self.launch, **kept}}, durable=True)

    def started(self, engine: Engine, handles: Mapping[str, Handle]) -> None:
        """Keep how another launcher finds the agents."""
        if isinstance(engine, LastingEngine):
            self.journal.write({HOSTS: {host: engine.trace(handle) for host, handle in handles.items()}}, durable=True)

    def adopting(self, description: RunDescription) -> Adopting:
        """The engine that finds what was started, instead of starting anything."""
        engine = make_engine(description.topology.engine.kind)
        traces: Any = self.journal.ledger[HOSTS]
        assert isinstance(engine, LastingEngine)
        gathered = Gathered(description.topology, {}, token=self.launch["token"], host=self.launch["host"])
        return Adopting(engine, gathered, traces, self.sizes(), may_be_gone=self.has_ended)


class Adopting:
    """Implements `zmqtrain.launcher.engine.GatheringEngine` for agents that another launcher has started."""

    def __init__(
        self, engine: LastingEngine, gathered: Gathered, traces: Mapping[str, Value], sizes: Mapping[str, int], *, may_be_gone: bool
    ) -> None:
        """``may_be_gone``: the run has ended, and perhaps all agents with it."""
        self._may_be_gone = may_be_gone
        self._engine, self._gathered, self._traces, self._sizes = engine, gathered, traces, sizes
        self._handles: dict[str, Handle] = {}

    async def gather(self, gathering: Gathering) -> Gathered:
        return self._gathered

    async def open(self, run: EngineRun) -> None:
        """Find the agents. Raises `NothingLeftError` if there is none, and the engine's error for hosts that it cannot reach."""
        self._handles = dict(await self._engine.adopt(run, self._traces, self._sizes))
        if not self._handles and not self._may_be_gone:
            raise nothing_left(run.directory)

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        return self._handles.get(host.name, GoneHandle())

    async def stop(self, handle: Handle, grace: float) -> None:
        if not isinstance(handle, GoneHandle):
            await self._engine.stop(handle, grace)

    async def close(self) -> None:
        await self._engine.close()


class GoneHandle:
    """An agent that is not there any more."""

    async def wait(self) -> int:
        return UNKNOWN_EXIT


def port_taken(error: PortInUseError, address: str) -> JournalError:
    """The error of a launcher that cannot listen where the members look for it."""
    return JournalError(
        f"this run's members look for their launcher at {address}, but another program listens there: end it, and try again before "
        f"they give up ([job] alone). {error}"
    )


# What is left here ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Left:
    """Agents on this machine that have outlived their launcher."""

    processes: tuple[psutil.Process, ...]
    grace_s: float

    @classmethod
    def of(cls, path: Path) -> Left:
        """What the run in this directory has left behind."""
        try:
            ledger = JournalFile.read(path / NAME)
        except JournalError:
            return cls((), 0.0)
        traces: Any = ledger.get(HOSTS) or {}
        found = [process for trace in traces.values() if (process := process_of(trace)) is not None]
        launch: Any = ledger[LAUNCH]
        description = RunDescription.from_value(launch["description"])
        return cls(tuple(found), description.topology.job.timeouts.grace_s)

    def stop(self) -> int:
        """End them, and their roles with them. Returns how many there were."""
        for number, patience_s in ((signal.SIGTERM, 2 * self.grace_s), (signal.SIGKILL, self.grace_s)):
            for process in self.processes:
                with suppress(psutil.NoSuchProcess):
                    if process.is_running():
                        process.send_signal(number)
            psutil.wait_procs(self.processes, timeout=patience_s)
        return len(self.processes)
