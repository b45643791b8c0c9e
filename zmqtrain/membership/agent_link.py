"""An agent's side of the membership: it reports which roles of its host are alive.

The life of an agent::

    link = await AgentLink.join(endpoint, coordinator_address=address, timeouts=timeouts)    # does not wait for other members
    link.on_halt(lambda reason: stop_all())
    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())                   # heartbeats, until the run is over
        ...                                             # start a process:    link.started("worker/3")
        ...                                             # one has ended:      await link.exited("worker/3", 1, report)
    await link.leave()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import ceil
from typing import Any

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.membership.client import HaltCallback, Membership
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Value

#: How often an agent shows that it is there, at least, before it counts as silent.
SIGNS = 3
#: The request by which the coordinator asks a host to leave the run.
WITHDRAW = "withdraw"
#: The request by which an agent that was told to end asks the coordinator to let its host leave (`WITHDRAW`).
LEAVES = "leaves"


class AgentLink:
    """Heartbeats and reports of one host's agent. Made by `join`."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.alone_s = 0.0
        """For how long the coordinator may be away once all members have joined; 0: not at all."""
        self._alive: set[PeerId] = set()
        self._ended_in: dict[PeerId, int] = {}  # the version of the view at which the last process of a role had ended
        self._coming: set[PeerId] = set()  # roles that were started again, and that no view has shown since

    @classmethod
    async def join(cls, endpoint: Endpoint, *, coordinator_address: str, timeouts: Timeouts) -> AgentLink:
        """Join as ``agent/HOST``. Raises like `Membership.join`, but does not wait for others."""
        return cls(await Membership.join(endpoint, coordinator_address=coordinator_address, timeouts=timeouts))

    @property
    def finished(self) -> asyncio.Event:
        """Set when the run is over: end what is still running here, and leave."""
        return self.membership.finished

    @property
    def alive(self) -> frozenset[PeerId]:
        """The roles that this agent reports as alive."""
        return frozenset(self._alive)

    def on_halt(self, callback: HaltCallback) -> None:
        """Call ``callback(reason)`` when the run must stop; see `Membership.on_halt`. The roles are told, too, and should end by
        themselves; the agent ends those that do not within the grace time."""
        self.membership.on_halt(callback)

    def on_lost(self, callback: Callable[[PeerId], None]) -> None:
        """Call ``callback(peer)`` for each living role of this host that the run continues without: the agent must end its
        process."""

        def tell(view: View) -> None:
            for peer in sorted(self._alive):
                if view.version <= self._ended_in.get(peer, 0):
                    continue  # it is about the previous process
                if peer in view.members:
                    self._coming.discard(peer)
                elif peer in view.lost and peer not in self._coming:  # otherwise it is the previous process that is lost
                    callback(peer)

        self.membership.on_view(tell)

    def on_withdraw(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when the coordinator asks this host to leave the run."""

        async def take(caller: PeerId) -> Value:
            if caller != COORDINATOR:
                raise ProtocolError(f"{caller} may not ask a host to leave; only the coordinator may")
            callback()
            return None

        self.membership.endpoint.serve(WITHDRAW, take)

    def started(self, peer: PeerId) -> None:
        """Record that a role's process is running. Call this before the process can join."""
        self._alive.add(peer)
        if peer in self._ended_in:
            self._coming.add(peer)

    async def exited(
        self,
        peer: PeerId,
        exit_code: int,
        report: Mapping[str, Any] | None = None,
        *,
        stopped: bool = False,
        pid: int | None = None,
        again: bool = False,
    ) -> None:
        """Report that a role's process has ended. ``exit_code``: negative for a signal. ``report``: the error report it wrote, if
        any. ``stopped``: this agent had told it to end, so its end is not a failure. ``pid``: its number on this host. ``again``:
        another process is started in its place."""
        sent: Value = None if report is None else dict(report)
        version = await self.membership._ask("exited", peer, exit_code, sent, stopped, pid, again)
        self._ended_in[peer] = version if isinstance(version, int) else 0
        # Only now: a heartbeat without the role must not overtake the report.
        self._alive.discard(peer)

    async def run(self) -> None:
        """Send heartbeats until the run is over; where there is much time between them, show in between that this host is there.
        Raises `PeerLostError` or `PeerTimeoutError` if the coordinator is gone or has given up this host: end all roles then."""
        timeouts = self.membership.timeouts
        self.membership.on_view(self._outlive)
        self._outlive(self.membership.view)
        while not self.finished.is_set():
            living: list[Value] = [*sorted(self._alive)]
            known = await self.membership._ask("heartbeat", living, timeout=timeouts.lost_s)
            if known is False and not self.finished.is_set():
                raise PeerLostError(COORDINATOR, "it has given up this host, because it had not heard from it for too long")
            pause_s = known if isinstance(known, float) else timeouts.heartbeat_s
            shown = ceil(pause_s / max(timeouts.heartbeat_s, timeouts.silent_s / SIGNS))
            for number in range(shown):
                if number:
                    self.membership.endpoint.show(COORDINATOR)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s / shown):
                        await self.finished.wait()
                    break

    def _outlive(self, view: View) -> None:
        if view.complete:
            self.membership.outlive(self.alone_s)

    async def leave(self) -> None:
        """Leave the run: this host is done. All its roles must have ended."""
        await self.membership.leave()
