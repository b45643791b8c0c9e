"""The coroutine around the roster: it serves the members' requests and carries out what the roster decides.

The launcher's part::

    coordinator = Coordinator(endpoint, placement, timeouts, on_report=run_directory.write)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(coordinator.run())
        ...                                   # start the agents, telling them endpoint.address and the run token
        await coordinator.running.wait()      # all have joined (or: coordinator.failed.wait())
        outcome = await run                   # "done", "halted" or "failed", with all failures; outcome.cause is the one to show

A program that runs the roles as its own coroutines passes ``agents=False``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from zmqtrain.errors import PeerLostError, ProtocolError, ZmqTrainError
from zmqtrain.membership.actions import Action, Answer, Discard, Drop, End, Meet, Note, Outcome, Push, Refuse, Ticket
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.roster import Roster
from zmqtrain.membership.view import View, expected_members
from zmqtrain.net.address import key_in
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Value

#: ``on_event(kind, values)``: an event of the membership; ``values["reason"]`` says why.
EventCallback: TypeAlias = Callable[[str, dict[str, Any]], None]
#: ``on_report(peer, events)``: a role's own events.
ReportCallback: TypeAlias = Callable[[PeerId, list[dict[str, Any]]], None]


@dataclass(slots=True)
class _Outbox:
    """Messages for one member. A newer view replaces an older one that was not sent yet, so this stays small."""

    pending: dict[str, Value] = field(default_factory=dict)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Coordinator:
    """Keeps the membership of one run. Make it inside the event loop, before any process gets the endpoint's address."""

    def __init__(
        self,
        endpoint: Endpoint,
        placement: Placement,
        timeouts: Timeouts,
        *,
        agents: bool = True,
        elastic: bool = False,
        on_event: EventCallback | None = None,
        on_report: ReportCallback | None = None,
    ) -> None:
        self.running = asyncio.Event()
        """Set once all members have joined."""
        self.failed = asyncio.Event()
        """Set when something failed; `run` continues for a moment to collect the reports of the others."""
        self.outcome: Outcome | None = None
        self._endpoint, self._timeouts = endpoint, timeouts
        self._loop = asyncio.get_running_loop()
        self._roster = Roster(expected_members(placement, agents=agents), timeouts, now=self._loop.time(), elastic=elastic)
        self._on_event, self._on_report = on_event, on_report
        self._tickets = count()
        self._waiting: dict[Ticket, asyncio.Future[Value]] = {}
        self._outboxes: dict[PeerId, _Outbox] = {}
        self._pushers: dict[PeerId, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        for name in ("join", "ready", "barrier", "agree", "needs_all", "heartbeat", "exited", "report", "halt", "failed", "leave"):
            endpoint.serve(f"membership.{name}", getattr(self, f"_serve_{name}"))
        endpoint.on_lost(lambda peer, reason: self._do(self._roster.handle_lost(peer, reason, self._now())))

    @property
    def view(self) -> View:
        """The members as they are now."""
        return self._roster.view()

    def halt(self, reason: Mapping[str, Any]) -> None:
        """Stop the run, as a role may by `Membership.halt`: every member is told once."""
        self._do(self._roster.handle_halt(COORDINATOR, reason, self._now()))

    def host_ended(self, host: str, reason: str) -> None:
        """The engine reports that a host's agent has ended: its roles have ended with it."""
        self._do(self._roster.handle_host_ended(host, reason, self._now()))

    async def run(self) -> Outcome:
        """Keep the membership until the run has ended. Cancelling it refuses all waiting requests, and does not notify other
        members."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for peer in self._outboxes:
                    self._start_pusher(peer)
                while self.outcome is None:
                    await self._wait_for_change(self._roster.next_deadline())
                    self._do(self._roster.tick(self._now()))
                await self._drain()
                self._group = None
                for pusher in self._pushers.values():
                    pusher.cancel()
        finally:
            self._group = None
            why = "the run has ended" if self.outcome is None else f"the run has ended: {self.outcome.reason}"
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerLostError(COORDINATOR, why))
        return self.outcome

    async def _wait_for_change(self, deadline: float | None) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _drain(self) -> None:
        """Send the last messages, for as long as the time-outs allow."""
        try:
            async with asyncio.timeout(self._timeouts.flush_s):
                for outbox in list(self._outboxes.values()):
                    await outbox.idle.wait()
        except TimeoutError:
            pass

    def _now(self) -> float:
        return self._loop.time()

    # Carrying out -------------------------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Answer(ticket, value):
                    future = self._waiting.get(ticket)
                    if future is not None and not future.done():
                        future.set_result(value)
                case Refuse(ticket, error):
                    future = self._waiting.get(ticket)
                    if future is not None and not future.done():
                        future.set_exception(error)
                case Discard(ticket):
                    future = self._waiting.get(ticket)
                    if future is not None:
                        future.cancel()  # and with it the task that serves the request
                case Push(to, what, value):
                    self._push(to, what, value)
                case Meet(peer, address):
                    self._endpoint.add_peer(peer, address)
                case Drop(peer, reason):
                    self._endpoint.forget(peer, reason)
                case Note(kind, values, reason):
                    self._note(kind, values, reason)
                case End(outcome):
                    self.outcome = outcome
        if actions:
            self._changed.set()

    def _note(self, kind: str, values: Mapping[str, Value], reason: str) -> None:
        if kind == "running":
            self.running.set()
        elif kind == "failed":
            self.failed.set()
        if self._on_event is not None:
            self._on_event(kind, {**values, "reason": reason})

    def _push(self, peer: PeerId, what: str, value: Value) -> None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox()
            self._start_pusher(peer)
        outbox.pending[what] = value
        outbox.idle.clear()
        outbox.filled.set()

    def _start_pusher(self, peer: PeerId) -> None:
        if self._group is not None and peer not in self._pushers:
            self._pushers[peer] = self._group.create_task(self._tell(peer, self._outboxes[peer]), name=f"tell {peer}")

    async def _tell(self, peer: PeerId, outbox: _Outbox) -> None:
        while True:
            await outbox.filled.wait()
            while outbox.pending:
                what = next(iter(outbox.pending))
                value = outbox.pending.pop(what)
                try:
                    await self._endpoint.request(peer, f"membership.{what}", value, timeout=self._timeouts.request_s)
                except ZmqTrainError as error:
                    # A member that cannot be reached is busy or gone; its agent reports which, and the roster acts on that.
                    self._note("untold", {"peer": peer, "what": what}, str(error))
            outbox.filled.clear()
            outbox.idle.set()

    # Requests -----------------------------------------------------------------------------------------------------------------

    async def _decide(self, decide: Callable[[Ticket], list[Action]]) -> Value:
        """Let the roster decide on a request that may have to wait. Returns the answer, or raises the refusal."""
        ticket = next(self._tickets)
        future: asyncio.Future[Value] = self._loop.create_future()
        self._waiting[ticket] = future
        try:
            self._do(decide(ticket))
            return await future
        finally:
            del self._waiting[ticket]

    async def _serve_join(self, caller: PeerId, incarnation: Value, address: Value) -> Value:
        if not isinstance(incarnation, int) or not isinstance(address, str):
            raise ProtocolError(f"{caller} joins with a wrong incarnation or address")
        self._check_key(caller, address)
        return await self._decide(lambda ticket: self._roster.handle_join(caller, incarnation, address, ticket, self._now()))

    def _check_key(self, caller: PeerId, address: str) -> None:
        """Addresses in views must contain the peer's key if connections are encrypted, and only then."""
        try:
            key = key_in(address)
        except ValueError as error:
            raise ProtocolError(f"{caller} joins with a wrong address: {error}") from error
        if (key is None) != (key_in(self._endpoint.address) is None):
            raise ProtocolError(f"{caller} {'does not encrypt' if key is None else 'encrypts'}, unlike this run")

    async def _serve_ready(self, caller: PeerId) -> Value:
        return await self._decide(lambda ticket: self._roster.handle_ready(caller, ticket, self._now()))

    async def _serve_barrier(self, caller: PeerId, name: Value, members: Value) -> Value:
        if not isinstance(name, str) or not (members is None or isinstance(members, list)):
            raise ProtocolError(f"{caller} calls a barrier with a wrong name or members")
        who = None if members is None else [str(member) for member in members]
        return await self._decide(lambda ticket: self._roster.handle_barrier(caller, name, who, ticket, self._now()))

    async def _serve_agree(self, caller: PeerId, name: Value, value: Value, members: Value, version: Value) -> Value:
        match name, value, members, version:
            case str(called), int(number), [*peers], int() | None as about:
                who = [str(peer) for peer in peers]
                return await self._decide(
                    lambda ticket: self._roster.handle_agree(caller, called, number, who, about, ticket, self._now())
                )
        raise ProtocolError(f"{caller} calls an agreement with a wrong name, value or members")

    async def _serve_needs_all(self, caller: PeerId, reason: Value) -> Value:
        self._do(self._roster.handle_needs_all(caller, str(reason)))
        return None

    async def _serve_heartbeat(self, caller: PeerId, alive: Value) -> Value:
        if not isinstance(alive, list):
            raise ProtocolError(f"{caller} sends a wrong heartbeat")
        self._do(self._roster.handle_heartbeat(caller, [str(peer) for peer in alive], self._now()))
        return self._roster.is_here(caller)

    async def _serve_exited(
        self, caller: PeerId, peer: Value, exit_code: Value, report: Value, stopped: Value, pid: Value = None
    ) -> Value:
        if not isinstance(peer, str) or not isinstance(exit_code, int) or not (report is None or isinstance(report, dict)):
            raise ProtocolError(f"{caller} sends a wrong report of an exit")
        if not (pid is None or isinstance(pid, int)):
            raise ProtocolError(f"{caller} sends a wrong report of an exit")
        self._do(self._roster.handle_exited(caller, peer, exit_code, report, stopped=bool(stopped), now=self._now(), pid=pid))
        return self._roster.view().version

    async def _serve_report(self, caller: PeerId, events: Value) -> Value:
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ProtocolError(f"{caller} sends wrong events")
        if self._on_report is not None:
            self._on_report(caller, events)
        return None

    async def _serve_halt(self, caller: PeerId, reason: Value) -> Value:
        if not isinstance(reason, dict):
            raise ProtocolError(f"{caller} stops the run with a wrong reason")
        self._do(self._roster.handle_halt(caller, reason, self._now()))
        return None

    async def _serve_failed(self, caller: PeerId, report: Value) -> Value:
        if not isinstance(report, dict):
            raise ProtocolError(f"{caller} sends a wrong error report")
        self._do(self._roster.handle_failed(caller, report, self._now()))
        return None

    async def _serve_leave(self, caller: PeerId) -> Value:
        self._do(self._roster.handle_leave(caller, self._now()))
        return None
