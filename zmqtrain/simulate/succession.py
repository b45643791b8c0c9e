"""Launchers of one simulated run, one after another: a coordinator dies, and another one goes on with its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.membership.journal import Ledger, apply, encode, replay
from zmqtrain.run.faults import RESTART_S, Fault
from zmqtrain.wire.payload import Value

if TYPE_CHECKING:
    from zmqtrain.membership.actions import Outcome
    from zmqtrain.run.assembly import Assembly
    from zmqtrain.simulate.network import SimulatedNetwork

#: When a coordinator dies, and the seconds until another one begins. The moment is a virtual time; or, as a whole number, the count
#: of records in its journal: it dies right after writing the last of them, before anybody has heard of it.
Death: TypeAlias = tuple[float | int, float]


class Records:
    """A journal in memory: what one coordinator has written, the next one reads."""

    def __init__(self, data: bytearray, die_after: int | None, die: Callable[[], None]) -> None:
        """``die()`` is called right after so many records."""
        self.count, self._die_after, self._die = 0, die_after, die
        self.superseded = False
        """Whether its process is dead, which cannot even clear up."""
        self.data, self.ledger = data, replay(bytes(data))[0]
        self._staged: Ledger = {}

    def stage(self, changes: Mapping[str, Value]) -> None:
        """Keep ``changes`` for the next record."""
        self._staged.update(changes)

    def write(self, changes: Mapping[str, Value], *, durable: bool) -> None:
        """Append a record to the journal."""
        new = {**self._staged, **changes}
        self._staged.clear()
        if self.superseded:
            return
        self.data += encode(new)
        apply(self.ledger, new)
        self.count += 1
        if self.count == self._die_after:
            self.superseded = True
            self._die()


#: Makes the coordinator's side on a new endpoint: of the number of this launcher, with this journal. Returns how to close the
#: endpoint, too.
Begin: TypeAlias = "Callable[[int, Records], tuple[Assembly, Callable[[], Awaitable[None]]]]"


class Succession:
    """The launchers of a run. `run` it once."""

    def __init__(self, network: SimulatedNetwork, begin: Begin, deaths: Sequence[Death], tell: Callable[[], None]) -> None:
        """``tell()`` is called when a coordinator dies."""
        self._network, self._begin, self._deaths, self._tell = network, begin, list(deaths), tell
        self._data = bytearray()
        self.launchers = 0
        """How many there have been."""
        self.records = 0
        """The number of records that the last one has written."""

    async def run(self, ended: Callable[[], Awaitable[None]]) -> Outcome:
        """The outcome that the last launcher arrives at. ``ended()`` is awaited before that one closes its endpoint."""
        loop = asyncio.get_running_loop()
        closing: list[asyncio.Task[None]] = []
        while True:
            self.launchers += 1
            dead = asyncio.Event()

            def die(dead: asyncio.Event = dead) -> None:
                self._network.kill(COORDINATOR)
                dead.set()

            moment, away_s = self._deaths.pop(0) if self._deaths else (None, 0.0)
            journal = Records(self._data, moment if isinstance(moment, int) else None, die)
            assembly, close = self._begin(self.launchers, journal)
            leading = asyncio.create_task(assembly.run(), name="coordinator")
            # Nothing is kept before all have joined: a launcher that dies before that leaves nothing to go on with.
            running = asyncio.create_task(assembly.coordinator.running.wait(), name="all have joined")
            dying = asyncio.create_task(dead.wait(), name="the coordinator's death")
            await asyncio.wait({leading, running, dying}, return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            limit = max(0.0, moment - loop.time()) if isinstance(moment, float) else None
            await asyncio.wait({leading, dying}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            self.records = journal.count
            if leading.done() and not dead.is_set():
                await ended()
                await close()
                break
            self._tell()
            journal.superseded = True
            die()
            leading.cancel()
            await asyncio.wait({leading})
            closing.append(asyncio.create_task(_closed(close), name="close a dead endpoint"))
            await asyncio.sleep(away_s)
        if closing:
            await asyncio.wait(closing)
        return leading.result()


async def _closed(close: Callable[[], Awaitable[None]]) -> None:
    await close()


def is_of_launcher(fault: Fault) -> bool:
    """Whether the fault hits the launcher."""
    return fault.target == COORDINATOR


def deaths_of(faults: Sequence[Fault]) -> list[Death]:
    """The deaths of launchers among the faults, in order."""
    found = [(fault.at or 0.0, RESTART_S if fault.lasts is None else fault.lasts) for fault in faults if is_of_launcher(fault)]
    return sorted(found)
