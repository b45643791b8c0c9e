"""A role's side of the membership.

The life of a role::

    membership = await Membership.join(endpoint, coordinator_address=address, timeouts=timeouts)   # all members have joined now
    membership.on_halt(lambda reason: worker.stop(reason))
    await membership.barrier("started")
    ...                                     # train; membership.view tells who is in the run
    await membership.report([{"kind": "step", "loss": 0.3}])
    await membership.leave()                # a server first waits for: await membership.finished.wait()
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from zmqtrain.errors import ProtocolError, ZmqTrainError
from zmqtrain.membership.alike import Difference, Facts
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.membership.touch import Touch, repeated
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import Endpoint, PeerId, Returned
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.waiting import abandoned
from zmqtrain.wire.payload import Value
from zmqtrain.world import random_bits

#: The most events in one request: enough for a quarter of a second, and far below the wire's limits.
EVENTS_AT_ONCE = 500

HaltCallback: TypeAlias = Callable[[dict[str, Any]], None]
ViewCallback: TypeAlias = Callable[[View], None]


class Membership:
    """One process's membership in the run. Made by `join`; all methods on the loop's thread."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self.endpoint = endpoint
        self.timeouts = timeouts
        self.view = View(0, False, {}, {})
        """The newest view. Replaced, never changed."""
        self.finished = asyncio.Event()
        """Set when all workers have left: finish and leave. For an agent: when the run is over; for a worker: when the others have
        begun to leave, since all was trained."""
        self.halted = asyncio.Event()
        """Set when the run must stop; `halt_reason` says why."""
        self.halt_reason: dict[str, Any] | None = None
        self.late = False
        """Whether the run was already in progress when this process joined, in place of one that was lost."""
        self._incarnation = 0
        self._leader: Value = None  # distinguishes the processes that have been the coordinator
        self._address = ""
        self._touch = Touch(timeouts.heartbeat_s, timeouts.lost_s)
        self._calls = random_bits(48)
        self._reports = 0
        self._reporting = asyncio.Lock()  # one at a time: they are numbered in the order of their arrival
        self._callbacks: list[HaltCallback] = []
        self._view_callbacks: list[ViewCallback] = []
        self._rifts: dict[tuple[PeerId, int], str] = {}  # roles that are lost to this one, and which process -> why
        self._rift = asyncio.Event()
        self._left = False
        self._needless = False
        self._scope = ""
        self._workers: tuple[PeerId, ...] | None = None

    @classmethod
    async def join(cls, endpoint: Endpoint, *, coordinator_address: str, timeouts: Timeouts) -> Membership:
        """Join the run as ``endpoint.peer``. For a worker or server it returns when all others have joined, too.

        On return the endpoint knows all addresses, and ``view`` is complete.
        Raises `PeerTimeoutError`, which names the missing members, `PeerLostError`, which names one that failed before all had
        joined, `RunTokenError`, or `ProtocolError` if this peer is not expected.
        """
        membership = cls(endpoint, timeouts)
        endpoint.serve("membership.view", membership._take_view)
        endpoint.serve("membership.halt", membership._take_halt)
        endpoint.serve("membership.finish", membership._take_finish)
        endpoint.on_lost(membership._take_lost)
        endpoint.add_peer(COORDINATOR, coordinator_address)
        number = endpoint.process
        membership._incarnation, membership._address = number, coordinator_address
        # The coordinator gives up first and says who is missing; this time-out is for a coordinator that does not answer.
        patience = timeouts.join_s + timeouts.lost_s
        answer = await endpoint.request(COORDINATOR, "membership.join", number, endpoint.address, timeout=patience)
        membership.late = isinstance(answer.meta, dict) and answer.meta.get("late") is True
        membership._leader = answer.meta.get("leader") if isinstance(answer.meta, dict) else None
        membership._newer(View.from_value(answer.meta))
        return membership

    def outlive(self, alone_s: float) -> None:
        """From now on the coordinator may be away for ``alone_s`` seconds (0: not at all): what it is asked waits, and the one that
        comes back is asked again. `keep_in_touch` must be running."""
        if alone_s and not self._touch.alone_s:
            self._touch.alone_s = alone_s
            self.endpoint.expect_back(COORDINATOR, self._returned)

    async def keep_in_touch(self) -> None:
        """Find the way back to the coordinator whenever it was lost. Run it as a task, and cancel it at the end."""
        telling = asyncio.create_task(self._tell_rifts(), name="tell with whom touch was lost")
        try:
            await self._touch.run(self._come_back, self._give_up)
        finally:
            await abandoned([telling])

    def hurry(self) -> None:
        """Wait no longer than a moment for a coordinator that is away: this process is about to end."""
        self._touch.hurry()

    @property
    def away(self) -> bool:
        """Whether the coordinator is away at the moment, and expected back."""
        return self._touch.away

    @property
    def alone_s(self) -> float:
        """How long the coordinator may be away, in seconds."""
        return self._touch.alone_s

    @property
    def peer(self) -> PeerId:
        """This member's peer id."""
        return self.endpoint.peer

    def among(self, scope: str, workers: Sequence[PeerId]) -> Membership:
        """This membership for what only some of the workers do together: `barrier` and `agree`, under names that begin
        with ``scope``. Everything else is asked of the original, whose `view` alone stays the newest."""
        some = copy.copy(self)
        some._scope, some._workers = scope, tuple(workers)
        return some

    async def ready(self) -> None:
        """Announce that this process, which joined a run in progress, can take part. On return ``view`` shows it, and that all can
        without whom it could not train."""
        patience_s = self.timeouts.barrier_s + self.timeouts.lost_s  # others without whom it cannot train may take longer
        self._newer(View.from_value(await self._ask("ready", timeout=patience_s)))

    async def until_here(self, peers: Sequence[PeerId]) -> View:
        """Wait until all ``peers`` are members, however long that takes. Returns the view that says so."""
        newer = asyncio.Event()
        self.on_view(lambda _: newer.set())
        while not self.view.members.keys() >= set(peers):
            newer.clear()
            await newer.wait()
        return self.view

    async def barrier(self, name: str, members: Sequence[PeerId] | None = None) -> None:
        """Wait until all ``members`` (all workers, if none are given) have called the barrier of this name.

        A name may be used again once all have passed. Raises `PeerTimeoutError`, which names the missing members, or
        `PeerLostError` as soon as a member is gone.
        """
        members = self._workers if members is None else members
        who: Value = None if members is None else list(members)
        await self._ask(
            "barrier", self._scope + name, who, self._next_call(), timeout=self.timeouts.barrier_s + self.timeouts.lost_s
        )

    async def agree(
        self,
        name: str,
        value: int,
        members: Sequence[PeerId],
        *,
        version: int | None = None,
        processes: Mapping[PeerId, int] | None = None,
    ) -> int:
        """Wait until all ``members`` have called the agreement of this name; all get the largest of their values.

        Either all get it or none: raises `PeerLostError` as soon as a member is gone, and `PeerTimeoutError`, which names those
        missing. ``version``: the agreement is about the view of this version; raises `ViewChangedError` if there is a newer one.
        ``processes``: the members' incarnations; one in whose place there is another process already is gone, too.
        """
        who: Value = list(members)
        lives: Value = None if processes is None else [processes[peer] for peer in members]
        patience_s = self.timeouts.barrier_s + self.timeouts.lost_s
        answer = await self._ask("agree", self._scope + name, value, who, version, self._next_call(), lives, timeout=patience_s)
        if not isinstance(answer, int):
            raise ProtocolError(f"the coordinator answered the agreement {name!r} with {answer!r:.60}, which is not a number")
        return answer

    async def need_all(self, reason: str) -> None:
        """Say that this run cannot continue without any of its workers, although its topology allows it."""
        await self._ask("needs_all", reason)

    async def alike(self, subject: str, host: str, facts: Facts) -> list[Difference]:
        """Say what this process has of a subject, on its host. Returns in what it differs from the first process that did."""
        told: Value = {what: list(items) for what, items in facts.items()}
        answer = await self._ask("alike", subject, host, told)
        if not isinstance(answer, list):
            raise ProtocolError(f"the coordinator answered what it was told of {subject!r} with {answer!r:.60}, which is no list")
        return [Difference.from_value(each) for each in answer]

    async def has_backup(self, shard: int, backup: PeerId) -> None:
        """Say that the server ``backup`` has an equal copy of the shard that this one serves. On return ``view`` shows it. Raises
        `PeerLostError` if that server is gone."""
        self._newer(View.from_value(await self._ask("backup", shard, backup)))

    async def hand_over(self, shard: int, to: PeerId) -> View:
        """Say that ``to``, the backup of a shard that this server serves, is to serve it: it has an equal copy, and nothing is
        carried out any more here. Returns the view that says so. Raises `PeerLostError` if that server is gone: then nothing has
        changed."""
        view = View.from_value(await self._ask("hand_over", shard, to))
        self._newer(view)
        return view

    async def without_backup(self, shard: int, backup: PeerId) -> None:
        """Say that a shard that this server serves needs this backup no more. On return ``view`` shows it."""
        self._newer(View.from_value(await self._ask("without_backup", shard, backup)))

    async def report(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send events (plain values) to the run's record; on return they have arrived, once."""
        async with self._reporting:
            for start in range(0, len(events), EVENTS_AT_ONCE):
                batch: list[Value] = [dict(event) for event in events[start : start + EVENTS_AT_ONCE]]
                self._reports += 1
                await self._ask("report", batch, self._incarnation, self._reports)

    async def halt(self, reason: Mapping[str, Any]) -> None:
        """Ask to stop the run: `on_halt` is called once in every member, including this one. ``reason["message"]`` is shown to the
        user."""
        await self._ask("halt", dict(reason))

    async def fail(self, report: Mapping[str, Any]) -> None:
        """Report that this role has failed, with its error report. For roles without an agent, whose end would not be noticed."""
        await self._ask("failed", dict(report))

    def on_halt(self, callback: HaltCallback) -> None:
        """Call ``callback(reason)`` when the run must stop: a member asked for it, one failed (``kind`` is ``failure``), or the
        coordinator is gone (``kind`` is ``coordinator lost``). It is called at most once, and immediately if the run has to stop
        already."""
        if self.halt_reason is not None:
            callback(self.halt_reason)
        else:
            self._callbacks.append(callback)

    def on_view(self, callback: ViewCallback) -> None:
        """Call ``callback(view)`` whenever there is a newer view."""
        self._view_callbacks.append(callback)

    def come_too_late(self) -> None:
        """The others have done this member's work: it will `leave` without having done any."""
        self._needless = True

    async def leave(self) -> None:
        """Leave the run: this member's work is done. From here on the coordinator's silence is not a failure. Idempotent.

        It waits until everything that it has sent has arrived, however long that takes on a slow network. Its end is not a loss to
        others. Raises `PeerTimeoutError` if nothing arrives any more. Not needed once the run must stop.
        """
        if not self._left:
            await self._finish()
            if not self._touch.alone_s:
                self._left = True
            await self._ask("leave", *([True] if self._needless else []))
            self._left = True

    async def _finish(self) -> None:
        if self.halted.is_set():
            return
        finishing = asyncio.ensure_future(self.endpoint.finish(timeout=self.timeouts.barrier_s + self._touch.alone_s))
        halted = asyncio.ensure_future(self.halted.wait())
        letting_go = asyncio.ensure_future(self._let_go())
        try:
            await asyncio.wait({finishing, halted}, return_when=asyncio.FIRST_COMPLETED)
            if finishing.done():
                await finishing
        finally:
            for one in (finishing, halted, letting_go):
                one.cancel()
            await asyncio.wait({finishing, halted, letting_go})

    async def _let_go(self) -> None:
        """Not wait for those that have left meanwhile: they need nothing, and if their links are down, do not say so any more."""
        while True:
            await asyncio.sleep(self.timeouts.grace_s)
            waiting: list[Value] = [*self.endpoint.undelivered()]
            if not waiting:
                continue
            with suppress(ZmqTrainError):  # then what is on its way must arrive
                left = await self._ask("left", waiting)
                for peer in left if isinstance(left, list) else ():
                    self.endpoint.let_go(str(peer))

    async def _ask(self, method: str, *args: Value, timeout: float | None = None) -> Value:
        return await self.ask(f"membership.{method}", *args, timeout=timeout)

    async def ask(self, method: str, *args: Value, timeout: float | None = None) -> Value:
        """A request to the coordinator that may be repeated; it waits for one that is away. ``timeout``: by default the usual one,
        while the coordinator is there."""
        wait = self.timeouts.request_s if timeout is None else timeout
        answer = await repeated(self.endpoint, COORDINATOR, lambda: self.endpoint.request(COORDINATOR, method, *args, timeout=wait))
        return answer.meta

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    # Touch --------------------------------------------------------------------------------------------------------------------

    async def _returned(self) -> Returned:
        # A coordinator that does not answer, although there is a connection to it, is away, too.
        self._touch.lose("the coordinator does not answer")
        return await self._touch.returned()

    async def _come_back(self) -> Returned:
        self.endpoint.add_peer(COORDINATOR, self._address)
        wait = self.timeouts.lost_s
        answer = (
            await self.endpoint.request(COORDINATOR, "membership.again", self._incarnation, self.endpoint.address, timeout=wait)
        ).meta
        if not isinstance(answer, dict):
            raise ProtocolError(f"the coordinator answered {answer!r:.60} to a member that was back")
        before, self._leader = self._leader, answer.get("leader")
        self._newer(View.from_value(answer["view"]))
        halt = answer["halt"]
        if isinstance(halt, dict):
            self._stop(dict(halt))
        if answer["finish"] is True:
            self.finished.set()
        return "same" if before == self._leader else "another"

    def _give_up(self, why: str) -> None:
        self._stop(
            {"kind": "coordinator lost", "peer": COORDINATOR, "message": f"the connection to the coordinator is lost: {why}"}
        )

    def _newer(self, view: View) -> None:
        if view.version <= self.view.version:
            return
        before, self.view = self.view, view
        for peer, reason in view.lost.items():
            if peer not in before.lost and peer != self.peer:
                was = before.members.get(peer)
                self.endpoint.forget(peer, reason, process=None if was is None else was.incarnation)
        for peer, member in view.members.items():
            known = before.members.get(peer)
            if peer == self.peer or (known is not None and known.incarnation == member.incarnation):
                continue
            if known is not None:  # lost and back again since the previous view
                self.endpoint.forget(peer, "another process has taken its place", process=known.incarnation)
            self.endpoint.add_peer(peer, member.address)
        for callback in list(self._view_callbacks):
            callback(view)

    def _stop(self, reason: dict[str, Any]) -> None:
        if self.halt_reason is None:
            self.halt_reason = reason
            self.halted.set()
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback(reason)

    async def _tell_rifts(self) -> None:
        """Tell the coordinator of roles that may be lost, and to which links are lost, unless it soon says itself that they are."""
        while True:
            await self._rift.wait()
            await asyncio.sleep(self.timeouts.grace_s)
            self._rift.clear()
            rifts, self._rifts = self._rifts, {}
            for (peer, process), reason in rifts.items():
                member = self.view.members.get(peer)
                if member is not None and member.incarnation == process and not self._left:
                    with suppress(ZmqTrainError):  # then this member is about to end
                        await self._ask("rift", peer, process, reason)

    def _take_lost(self, peer: PeerId, reason: str) -> None:
        member = self.view.members.get(peer)
        workers = member is not None and member.kind == "worker" and self.peer.startswith("worker/")
        if member is not None and (workers or (member.is_role and bool(self.view.chains))):  # then servers may be lost, too
            self._rifts[peer, member.incarnation] = reason
            self._rift.set()
        # One that has left may still have something to report.
        if peer == COORDINATOR and not self._touch.lose(reason) and not self._left:
            self._stop(
                {"kind": "coordinator lost", "peer": peer, "message": f"the connection to the coordinator is lost: {reason}"}
            )

    async def _take_view(self, caller: PeerId, value: Value) -> Value:
        if caller == COORDINATOR:
            self._newer(View.from_value(value))
        return None

    async def _take_halt(self, caller: PeerId, value: Value) -> Value:
        if caller == COORDINATOR and isinstance(value, dict):
            self._stop(dict(value))
        return None

    async def _take_finish(self, caller: PeerId, _value: Value = None) -> Value:
        if caller == COORDINATOR:
            self.finished.set()
        return None
