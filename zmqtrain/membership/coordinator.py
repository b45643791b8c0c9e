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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from zmqtrain.errors import PeerLostError, ProtocolError, SupersededError, ZmqTrainError
from zmqtrain.membership.actions import Action, Answer, Discard, Drop, End, Meet, Note, Outcome, Push, Refuse, Ticket
from zmqtrain.membership.alike import Alike, facts_of
from zmqtrain.membership.chains import Chains
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.membership.journal import Journal, change
from zmqtrain.membership.ledger import RUN
from zmqtrain.membership.roster import Roster
from zmqtrain.membership.state import State
from zmqtrain.membership.view import View, expected_members, spare_members
from zmqtrain.net.address import key_in
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.value import ValuePayload
from zmqtrain.world import random_bits

#: ``on_event(kind, values)``: an event of the membership; ``values["reason"]`` says why.
EventCallback: TypeAlias = Callable[[str, dict[str, Any]], None]
#: ``on_report(peer, events)``: a role's own events.
ReportCallback: TypeAlias = Callable[[PeerId, list[dict[str, Any]]], None]


#: Names in the ledger: of events that may not be recorded yet, and what the names of members' newest reports begin with.
NOTED, REPORTED = "noted", "reported/"


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
        lasting: bool = False,
        whole_groups: bool = False,
        heads: Sequence[PeerId] = (),
        copies: bool = True,
        on_event: EventCallback | None = None,
        on_report: ReportCallback | None = None,
        journal: Journal | None = None,
    ) -> None:
        """``lasting``: model servers have what workers have trained, if all of these are lost. ``whole_groups``: no worker of a
        group can train without the others.

        ``heads``: the servers that begin with a shard each, if others may come to serve them. ``copies``: each shard is to be on
        two. ``journal``: keeps what is decided, for another coordinator of this run. If it holds something, this is that one."""
        self.running = asyncio.Event()
        """Set once all members have joined."""
        self.failed = asyncio.Event()
        """Set when something failed; `run` continues for a moment to collect the reports of the others."""
        self.outcome: Outcome | None = None
        self._endpoint, self._timeouts = endpoint, timeouts
        self._loop = asyncio.get_running_loop()
        ledger = None if journal is None or RUN not in journal.ledger else journal.ledger
        self._roster = Roster(
            expected_members(placement, agents=agents),
            timeouts,
            now=self._loop.time(),
            elastic=elastic,
            lasting=lasting,
            patient=journal is not None,
            whole_groups=whole_groups,
            chains=Chains(heads) if heads else None,
            copies=copies,
            ledger=ledger,
            spare=spare_members(placement) if agents else (),
        )
        self._journal, self._leader = journal, random_bits(48)
        self._kept: dict[str, Value] = self._roster.ledger() if ledger is not None else {}  # what the journal has of the roster
        self._over = False  # the run has ended, and all who could be reached were told
        self._superseded = asyncio.Event()
        self._reported: dict[str, list[int]] = {}  # the newest report of each member: its incarnation, and the report's number
        for name, value in (ledger or {}).items():
            if name.startswith(REPORTED) and isinstance(value, list):
                self._reported[name] = [int(str(number)) for number in value]
        self._on_event, self._on_report = on_event, on_report
        self._tickets = count()
        self._waiting: dict[Ticket, asyncio.Future[Value]] = {}
        self._outboxes: dict[PeerId, _Outbox] = {}
        self._pushers: dict[PeerId, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._answer: tuple[Value, Payload] = None, ValuePayload()  # the newest one: its value, and what was sent
        self._alike = Alike()
        self._changed = asyncio.Event()
        self._moved = asyncio.Event()  # set at the next decision, and replaced
        if ledger is not None:
            self.running.set()
            if self._roster.state is State.FAILED:
                self.failed.set()
            self._do(self._roster.met())
        served = ("join", "again", "ready", "barrier", "agree", "needs_all", "alike", "backup", "heartbeat", "exited", "rift")
        for name in (*served, "hand_over", "without_backup", "report", "halt", "failed", "left", "leave"):
            endpoint.serve(f"membership.{name}", getattr(self, f"_serve_{name}"))
        endpoint.on_superseded(self._give_way)
        endpoint.on_lost(lambda peer, reason: self._do(self._roster.handle_lost(peer, reason, self._now())))

    @property
    def view(self) -> View:
        """The members as they are now."""
        return self._roster.view()

    async def until(self, is_so: Callable[[View], bool]) -> bool:
        """Wait for a view of which ``is_so`` is true. Returns False if the run ends before there is one."""
        while not is_so(self.view):
            if self.outcome is not None:
                return False
            await self._moved.wait()
        return True

    def halt(self, reason: Mapping[str, Any]) -> None:
        """Stop the run, as a role may by `Membership.halt`: every member is told once."""
        self._do(self._roster.handle_halt(COORDINATOR, reason, self._now()))

    def let_go(self, servers: Sequence[PeerId]) -> None:
        """These model servers are to leave: what they have of the model goes to others, as views tell."""
        self._do(self._roster.handle_leaving(servers, self._now()))

    def host_ended(self, host: str, reason: str) -> None:
        """The engine reports that a host's agent has ended: its roles have ended with it."""
        self._do(self._roster.handle_host_ended(host, reason, self._now()))

    async def run(self) -> Outcome:
        """Keep the membership until the run has ended. Cancelling it refuses all waiting requests, and does not notify other
        members. Raises `SupersededError` if another process has taken over."""
        try:
            if self._journal is not None:
                self._tell_again(self._journal.ledger)
            async with asyncio.TaskGroup() as group:
                self._group = group
                for peer in self._outboxes:
                    self._start_pusher(peer)
                self.outcome = self._roster.ended()  # another coordinator's last decision
                while self.outcome is None:
                    await self._wait_for_change(self._roster.next_deadline())
                    if self._superseded.is_set():
                        raise SupersededError
                    self._roster.handle_shown(self._endpoint.heard_at, self._now())
                    self._do(self._roster.tick(self._now()))
                await self._let_agents_leave()
                await self._drain()
                self._group = None
                for pusher in self._pushers.values():
                    pusher.cancel()
        finally:
            self._group = None
            self._over = True
            why = "the run has ended" if self.outcome is None else f"the run has ended: {self.outcome.reason}"
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerLostError(COORDINATOR, why))
        return self.outcome

    async def _let_agents_leave(self) -> None:
        """Agents that are out of touch come back, and learn that the run has ended. If they end with their coordinator instead,
        only those are waited for that the launcher has not started."""
        late = self._journal is None
        deadline = self._now() + self._timeouts.silent_s
        while self._roster.agents_here(late=late) and self._now() < deadline and not self._superseded.is_set():
            await self._wait_for_change(deadline)

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

    # What is kept -------------------------------------------------------------------------------------------------------------

    @property
    def superseded(self) -> bool:
        """Whether another process has taken over."""
        return self._superseded.is_set()

    def _give_way(self) -> None:
        self._superseded.set()
        self._changed.set()

    def _keep(self, actions: list[Action]) -> None:
        """Write what was decided to the journal, before anybody learns of it. Nothing is kept before all members have joined."""
        if self._journal is None or not actions or self._roster.state is State.JOINING:
            return
        ledger = self._roster.ledger()
        changes = change(self._kept, ledger)
        notes: list[Value] = [
            [action.kind, {**action.values, "reason": action.reason}] for action in actions if isinstance(action, Note)
        ]
        if changes or notes:
            self._journal.write({**changes, NOTED: notes or None}, durable=True)
            self._kept = ledger
        if self._journal.superseded:
            raise SupersededError

    def _tell_again(self, ledger: Mapping[str, Value]) -> None:
        """Events that the coordinator before had decided on, but perhaps not recorded."""
        noted: Any = ledger.get(NOTED) or []
        if noted and self._on_event is not None:
            for kind, values in noted:
                self._on_event(kind, values)
        self._noted()

    def _noted(self) -> None:
        """The events of the newest decision are recorded."""
        if self._journal is not None and NOTED in self._journal.ledger:
            self._journal.write({NOTED: None}, durable=False)

    # Carrying out -------------------------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        if self._superseded.is_set():
            return
        try:
            self._keep(actions)
        except SupersededError:
            self._give_way()
            return
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
                case Drop(peer, reason, incarnation):
                    self._endpoint.forget(peer, reason, process=incarnation)
                case Note(kind, values, reason):
                    self._note(kind, values, reason)
                case End(outcome):
                    self.outcome = outcome
        if actions:
            self._noted()
            self._changed.set()
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()

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

    async def _serve_join(self, caller: PeerId, incarnation: Value, address: Value) -> Payload:
        if not isinstance(incarnation, int) or not isinstance(address, str):
            raise ProtocolError(f"{caller} joins with a wrong incarnation or address")
        self._check_key(caller, address)
        joined = await self._decide(lambda ticket: self._roster.handle_join(caller, incarnation, address, ticket, self._now()))
        return self._signed(joined)

    def _signed(self, value: Value) -> Payload:
        """An answer that says which process has given it. All who get the same value get one payload, which is packed once."""
        assert isinstance(value, dict)
        if self._answer[0] is not value:
            self._answer = value, ValuePayload({**value, "leader": self._leader})
        return self._answer[1]

    def _check_key(self, caller: PeerId, address: str) -> None:
        """Addresses in views must contain the peer's key if connections are encrypted, and only then."""
        try:
            key = key_in(address)
        except ValueError as error:
            raise ProtocolError(f"{caller} joins with a wrong address: {error}") from error
        if (key is None) != (key_in(self._endpoint.address) is None):
            raise ProtocolError(f"{caller} {'does not encrypt' if key is None else 'encrypts'}, unlike this run")

    async def _serve_again(self, caller: PeerId, incarnation: Value, address: Value) -> Payload:
        if not isinstance(incarnation, int) or not isinstance(address, str):
            raise ProtocolError(f"{caller} comes back with a wrong incarnation or address")
        return self._signed(await self._decide(lambda ticket: self._roster.handle_again(caller, incarnation, ticket, self._now())))

    async def _serve_ready(self, caller: PeerId) -> Value:
        return await self._decide(lambda ticket: self._roster.handle_ready(caller, ticket, self._now()))

    async def _serve_barrier(self, caller: PeerId, name: Value, members: Value, call: Value = None) -> Value:
        if not isinstance(name, str) or not (members is None or isinstance(members, list)) or not isinstance(call, int | None):
            raise ProtocolError(f"{caller} calls a barrier with a wrong name or members")
        who = None if members is None else [str(member) for member in members]
        return await self._decide(lambda ticket: self._roster.handle_barrier(caller, name, who, ticket, self._now(), call))

    async def _serve_agree(
        self,
        caller: PeerId,
        name: Value,
        value: Value,
        members: Value,
        version: Value,
        call: Value = None,
        lives: Value = None,
    ) -> Value:
        match name, value, members, version, call, lives:
            case str(called), int(number), [*peers], int() | None as about, int() | None as numbered, list() | None:
                who = [str(peer) for peer in peers]
                processes = None if lives is None else dict(zip(who, lives, strict=False))
                return await self._decide(
                    lambda ticket: self._roster.handle_agree(
                        caller, called, number, who, about, ticket, self._now(), numbered, processes
                    )
                )
        raise ProtocolError(f"{caller} calls an agreement with a wrong name, value or members")

    async def _serve_needs_all(self, caller: PeerId, reason: Value) -> Value:
        self._do(self._roster.handle_needs_all(caller, str(reason)))
        return None

    async def _serve_rift(self, caller: PeerId, other: Value, process: Value, reason: Value) -> Value:
        if not isinstance(other, str) or not isinstance(process, int):
            raise ProtocolError(f"{caller} names a wrong worker with which it has lost touch")
        self._do(self._roster.handle_rift(caller, other, process, str(reason), self._now()))
        return None

    async def _serve_alike(self, caller: PeerId, subject: Value, host: Value, facts: Value) -> Value:
        said = facts_of(facts)
        if not isinstance(subject, str) or not isinstance(host, str) or said is None:
            raise ProtocolError(f"{caller} says wrongly what it has")
        return [difference.to_value() for difference in self._alike.compare(subject, caller, host, said)]

    async def _serve_backup(self, caller: PeerId, shard: Value, backup: Value) -> Value:
        if not isinstance(shard, int) or not isinstance(backup, str):
            raise ProtocolError(f"{caller} names a wrong shard or server")
        return await self._decide(lambda ticket: self._roster.handle_backup(caller, shard, backup, ticket, self._now()))

    async def _serve_hand_over(self, caller: PeerId, shard: Value, to: Value) -> Value:
        if not isinstance(shard, int) or not isinstance(to, str):
            raise ProtocolError(f"{caller} names a wrong shard or server")
        return await self._decide(lambda ticket: self._roster.handle_hand_over(caller, shard, to, ticket, self._now()))

    async def _serve_without_backup(self, caller: PeerId, shard: Value, backup: Value) -> Value:
        if not isinstance(shard, int) or not isinstance(backup, str):
            raise ProtocolError(f"{caller} names a wrong shard or server")
        return await self._decide(lambda ticket: self._roster.handle_without_backup(caller, shard, backup, ticket, self._now()))

    async def _serve_heartbeat(self, caller: PeerId, alive: Value) -> Value:
        if not isinstance(alive, list):
            raise ProtocolError(f"{caller} sends a wrong heartbeat")
        self._do(self._roster.handle_heartbeat(caller, [str(peer) for peer in alive], self._now()))
        # Whoever was cut off when the run ended could not be told that it has.
        return self._roster.heartbeat_s if self._roster.is_here(caller) and not self._over else False

    async def _serve_exited(
        self,
        caller: PeerId,
        peer: Value,
        exit_code: Value,
        report: Value,
        stopped: Value,
        pid: Value = None,
        again: Value = False,
    ) -> Value:
        if not isinstance(peer, str) or not isinstance(exit_code, int) or not (report is None or isinstance(report, dict)):
            raise ProtocolError(f"{caller} sends a wrong report of an exit")
        if not (pid is None or isinstance(pid, int)):
            raise ProtocolError(f"{caller} sends a wrong report of an exit")
        now = self._now()
        self._do(
            self._roster.handle_exited(
                caller, peer, exit_code, report, stopped=bool(stopped), now=now, pid=pid, again=again is True
            )
        )
        return self._roster.version

    async def _serve_report(self, caller: PeerId, events: Value, incarnation: Value = None, number: Value = None) -> Value:
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ProtocolError(f"{caller} sends wrong events")
        if self._journal is not None and self._journal.superseded:
            self._give_way()
            await asyncio.Event().wait()  # until this process ends: the caller then asks the one that has taken over
        if isinstance(incarnation, int) and isinstance(number, int):
            name = f"{REPORTED}{caller}"
            known = self._reported.get(name)
            if known is not None and known[0] == incarnation and number <= known[1]:
                return None  # its answer was lost
            self._reported[name] = [incarnation, number]
            if self._journal is not None:  # in the same record as how far the files have come with it
                self._journal.stage({name: [incarnation, number]})
        if self._on_report is not None:
            self._on_report(caller, events)
        if self._journal is not None:
            self._journal.write({}, durable=False)
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

    async def _serve_left(self, caller: PeerId, peers: Value) -> Value:
        if not isinstance(peers, list):
            raise ProtocolError(f"{caller} asks wrongly who has left")
        return [peer for peer in map(str, peers) if self._roster.has_left(peer)]

    async def _serve_leave(self, caller: PeerId, late: Value = False) -> Value:
        self._do(self._roster.handle_leave(caller, self._now(), late=late is True))
        return None
