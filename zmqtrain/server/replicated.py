"""A model server of a run whose shards are kept twice, or may move: it serves its own shard, keeps copies of others, and serves
those whose servers are lost or hand them over::

    configure, initial values -> a copy for the backup -> serving (`Head`) ... -> finished
    a copy from another server -> its operations ...   -> that server is lost -> serving (`Head`) ...
                                                       -> or hands the shard over -> the same
    serving (`Head`) -> hands the shard over           -> a copy of it, or nothing

Which server serves a shard is what the newest view of the members says (`zmqtrain.membership.chains`). A worker may know of a
newer view than this server, so what it asks for waits until this server knows of it, too. It may also know of an older one: then it
is told that the shard has moved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError, TooLateError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.server_changes import CHANGE, HISTORY, MEMBERS
from zmqtrain.exchange.server_heads import AGAIN
from zmqtrain.exchange.server_messages import (
    MOVED,
    Configuration,
    moved_value,
    parameters_tag,
    parse_push_tag,
)
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import EndingError, Endpoint, PeerId, Subscription, Tag
from zmqtrain.server.background import ServerTasks
from zmqtrain.server.chain_head import HandedOverError
from zmqtrain.server.fill import fill, make_entries
from zmqtrain.server.gate import ShutGate
from zmqtrain.server.head import Head
from zmqtrain.server.lives import Seen, told_change, told_teams
from zmqtrain.server.load import LoadEvents
from zmqtrain.server.operations import LOG, LOGGED, Operation, logged_tag
from zmqtrain.server.serving import ServerTools, Shard, report
from zmqtrain.server.settings import MakeCheckpoints, ServerSettings
from zmqtrain.server.shard_copy import Incoming, ShardCopy
from zmqtrain.server.stream import FIRST
from zmqtrain.topology.placement import Placement, backups_for
from zmqtrain.waiting import task_group
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.value import ValuePayload


class Follower:
    """A copy of a shard that another server serves."""

    def __init__(self, head: PeerId, *, incoming: Incoming | None = None, copy: ShardCopy | None = None) -> None:
        """``head``: the server that serves the shard. ``incoming``: the copy that it sends. ``copy``: one that is complete."""
        self.head, self.incoming = head, incoming
        self.copy = copy
        """Set once it is complete."""
        self.moved = asyncio.Event()
        """There may be something to acknowledge."""


class ReplicatedServer:
    """A model server whose shards may be on other servers, too, or move there. Call `run` once."""

    def __init__(
        self,
        endpoint: Endpoint,
        membership: Membership,
        placement: Placement,
        settings: ServerSettings,
        *,
        checkpoints: MakeCheckpoints,
        copies: bool,
        recorder: Recorder | None = None,
        arena: Arena | None = None,
    ) -> None:
        """``checkpoints(shard)``: where the parts of a shard are stored. ``copies``: each shard is to be on two servers. ``arena``:
        the memory that it shares with other processes of its host."""
        self._endpoint, self._membership, self._settings, self._arena = endpoint, membership, settings, arena
        self._recorder: Recorder = recorder or NullRecorder()
        self._make_checkpoints, self._copies = checkpoints, copies
        self.backups = backups_for(placement, endpoint.peer)
        """The others, by how well they can be its backup."""
        self._news = News(membership)
        self._seen = Seen(settings.workers)
        self._heads: dict[int, Head] = {}
        self._followers: dict[int, Follower] = {}
        self._parked: dict[int, dict[tuple[PeerId, int], tuple[PeerId, Tag, Payload]]] = {}  # pushes that come before a view
        self._shards: dict[int, int] = {}  # piece -> shard
        self._handed: dict[int, int] = {}  # shards that were handed over, with the version of the view since which this is so
        self._early: dict[int, list[Payload]] = {}  # of shards that are being handed over: what their next servers have sent
        self._headed = asyncio.Event()  # it serves another shard
        self._holds = membership.late  # whether it has got what it begins with: one that comes late begins with nothing
        self._servers = frozenset(server.peer for server in placement.every_server)
        self._serving: set[int] = set()  # of the heads, those whose workers are answered
        self._arithmetic = Arithmetic("compute")
        self._halted: PeerLostError | None = None

    async def run(self) -> None:
        """Returns when all workers have finished. Raises `PeerLostError` if one is lost before this server has begun, or if a
        backup is out of reach although it is not lost."""
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        self._configured: asyncio.Future[Configuration] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        endpoint.serve("configure", self._on_configure)
        of_a_shard: dict[str, Callable[..., Awaitable[Value]]] = {
            "checkpoint": self._on_checkpoint,
            "show": self._on_show,
            "left": self._on_left,
            "finished": self._on_finished,
            MEMBERS: self._unless_over(self._on_members),
            CHANGE: self._unless_over(self._on_change),
            HISTORY: self._unless_over(self._on_history),
            AGAIN: self._unless_over(self._on_again),
        }
        for method, handler in of_a_shard.items():
            endpoint.serve(method, self._unless_moved(handler))
        endpoint.on_lost(self._on_lost)
        topics = [endpoint.subscribe(topic) for topic in ("push", LOG, LOGGED)]
        pushes, log, logged = topics
        try:
            async with task_group() as tasks:
                self._background = ServerTasks(tasks)
                lives = [tasks.create_task(each) for each in (self._take_pushes(pushes), self._take_log(log))]
                lives += [tasks.create_task(self._take_logged(logged)), tasks.create_task(self._finish())]
                if not self._membership.late:
                    lives.append(tasks.create_task(self._begin()))
                self._membership.on_view(self._heed)
                self._heed(self._membership.view)
                await self._done
                for head in self._heads.values():
                    head.over = True
                for life in lives:
                    life.cancel()
                self._background.end()
        finally:
            for topic in topics:
                topic.close()
            self._arithmetic.close()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # raised above, unless another error came first
        for head in self._heads.values():
            head.copy.state_held(backup=False)
        chains = self._news.view.chains
        for shard, follower in self._followers.items():
            if follower.copy is not None and endpoint.peer in chains[shard]:
                follower.copy.state_held(backup=True)
        report({number: head.copy.shard for number, head in self._heads.items()}, self._recorder)

    async def _finish(self) -> None:
        """Once all workers have left: nobody needs a copy that is still being made, or the end of one whose server has ended."""
        await self._membership.finished.wait()
        followed = [follower.copy for follower in self._followers.values() if follower.copy is not None]
        for copy in (*(head.copy for head in self._heads.values()), *followed):
            copy.lives.finish_all()
        for head in self._heads.values():
            head.finished()
        self.maybe_end()

    def halt(self, reason: Mapping[str, Any]) -> None:
        """The run must stop."""
        peer = str(reason.get("peer", "worker"))
        self._halted = PeerLostError(peer, str(reason.get("message", "the run was halted")), waiting_for="workers")
        self.maybe_end()

    # Its own shard.

    def _tools(self, shard: int) -> ServerTools:
        return ServerTools(
            self._endpoint, self._settings, self._recorder, self._make_checkpoints(shard), self._arithmetic, self._background
        )

    async def _begin(self) -> None:
        configuration, number = await self._configured, self._settings.index
        tools, shard = self._tools(number), Shard()
        make_entries(shard, configuration, number, self._arena)
        first_step = await fill(shard, configuration, tools)
        copy = ShardCopy(tools, configuration, number, shard, first_step=first_step, gate=ShutGate())
        self._seen.add(copy.lives.training)
        self._know(configuration)
        head = self._serve(tools, copy)
        await head.settled.wait()  # from the first step on nothing is lost with a server
        await head.begin()
        self._announce(head)
        self._holds = True

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it for as long as this server lasts. Nothing happens if it is ending because of an error."""
        with suppress(EndingError):
            self._background.run(coroutine)

    def _know(self, configuration: Configuration) -> None:
        if not self._shards:
            self._shards = {piece.index: piece.server for piece in configuration.pieces()}

    def _serve(self, tools: ServerTools, copy: ShardCopy, *, joined: PeerId | None = None) -> Head:
        head = Head(tools, copy, self._membership, self._news, self, copies=self._copies, joined=joined)
        self._heads[copy.number] = head
        self._handed.pop(copy.number, None)
        self._run(head.run())
        return head

    def _announce(self, head: Head) -> None:
        """From now on it serves the shard: also what was asked for before."""
        self._serving.add(head.copy.number)
        self._headed.set()
        self._headed = asyncio.Event()
        for sender, tag, payload in self._parked.pop(head.copy.number, {}).values():
            self._run(self._push(head, sender, tag, payload))
        self._drop_gone(self._news.view)

    async def _head(self, shard: Value) -> Head:
        """The head of a shard, once this server serves it. Raises `ProtocolError` if it does not within the time that workers wait
        for parameters."""
        try:
            async with asyncio.timeout(self._settings.barrier_s):
                while shard not in self._serving:
                    await self._headed.wait()
        except TimeoutError:
            raise ProtocolError(f"{self._endpoint.peer} does not serve shard {shard!r:.20}") from None
        assert isinstance(shard, int)
        return self._heads[shard]

    # Copies of other shards.

    async def _take_log(self, log: Subscription) -> None:
        async for sender, tag, payload in log:
            shard = tag[1]
            if sender not in self._servers or not isinstance(shard, int):
                raise ProtocolError(f"{sender} sent {tag!r:.60}, which only model servers may")
            if isinstance(payload.meta, list) and payload.meta[:1] == ["begin"]:
                if shard not in self._heads:  # otherwise the sender does not know yet that it counts as lost
                    self._follow(shard, Follower(sender, incoming=Incoming(sender, payload)))
                continue
            follower = self._followers.get(shard)
            if follower is not None and follower.head == sender:
                if payload.meta == ["over"]:
                    self._forget(shard)
                else:
                    await self._take_of(shard, follower, payload)
            elif shard in self._early:  # its next server knows it earlier than this one
                self._early[shard].append(payload)

    def _follow(self, shard: int, follower: Follower) -> None:
        self._forget(shard)
        self._followers[shard] = follower
        self._run(self._acknowledge(shard, follower))

    def _forget(self, shard: int) -> Follower | None:
        follower = self._followers.pop(shard, None)
        if follower is not None:
            follower.moved.set()
        return follower

    async def _take_of(self, shard: int, follower: Follower, payload: Payload) -> None:
        """The next message of the server that serves the shard."""
        copy = follower.copy
        if copy is None:
            assert follower.incoming is not None
            if not follower.incoming.take(payload):
                return
            copy = follower.copy = follower.incoming.copy(self._tools(shard), shard, ShutGate())
            self._know(copy.configuration)
            self._seen.add(copy.lives.training)
        else:
            _, number, operation = Operation.of(payload)
            async with copy.lock:
                if self._followers.get(shard) is not follower:  # it serves the shard itself by now
                    return
                await copy.perform(operation, number)
        follower.moved.set()
        self.maybe_end()

    async def _acknowledge(self, shard: int, follower: Follower) -> None:
        """Tell the server of the shard how far its copy here has got."""
        told = -1
        while self._followers.get(shard) is follower:
            follower.moved.clear()
            if follower.copy is not None and follower.copy.done > told:
                told = follower.copy.done
                try:
                    await self._endpoint.send(follower.head, logged_tag(shard), ValuePayload([told]), priority=FIRST)
                except PeerLostError as error:
                    # A view will say so. If none does, only the link is lost, and the other one would wait for ever.
                    await self._news.until(lambda _: self._followers.get(shard) is not follower, error)
                continue
            await follower.moved.wait()

    async def _take_logged(self, logged: Subscription) -> None:
        async for sender, tag, payload in logged:
            match tag, payload.meta:
                case (_, int(shard)), [int(number)]:
                    if (head := self._heads.get(shard)) is not None:
                        head.acknowledge(sender, number)
                case _:
                    raise ProtocolError(f"{sender} sent {payload.meta!r:.60} as what it has of a shard")

    async def _take_over(self, shard: int, copy: ShardCopy) -> None:
        async with copy.lock:  # an operation may be under way
            # If there is a backup, it has served the shard so far, has handed it over, and keeps its copy.
            _, *backup = self._news.view.chains[shard]
            head = self._serve(self._tools(shard), copy, joined=backup[0] if backup else None)
        reason = f"{self._endpoint.peer} serves shard {shard} from now on"
        self._recorder.event("took over", shard=shard, updates=copy.shard.updates, reason=reason)
        self._announce(head)
        head.goes_on()

    # Shards that move.

    async def give_away(self, head: Head, to: PeerId) -> None:
        """Implements `zmqtrain.server.head.Server`."""
        copy, shard = head.copy, head.copy.number
        early = self._early[shard] = []
        try:
            view = await self._membership.hand_over(shard, to)
        except PeerLostError as error:
            if error.peer != to:
                raise
            await self._news.until(lambda view: view.chains[shard][:1] == (self._endpoint.peer,) and to not in view.members, error)
            return
        finally:
            del self._early[shard]
        # From here on without waiting, until this server knows itself as what it is now.
        del self._heads[shard]
        self._serving.discard(shard)
        self._handed[shard] = view.version
        copy.serving.gate = ShutGate()
        owed = copy.serving.retire()
        head.hand_over(view.version)
        if self._endpoint.peer in view.chains[shard]:
            self._follow(shard, Follower(to, copy=copy))
        for peer in sorted({peer for peer, _ in owed}):
            self._run(self._tell_moved(peer, shard, [tag for each, tag in owed if each == peer]))
        for payload in early:
            _, number, operation = Operation.of(payload)
            await copy.perform(operation, number)
        for follower in self._followers.values():
            follower.moved.set()
        self._heed(self._news.view)

    async def _tell_moved(self, peer: PeerId, shard: int, tags: Sequence[Tag]) -> None:
        """Tell a worker that it gets these from another server."""
        told: list[Value] = [list(tag) for tag in tags]
        while True:
            try:
                await self._endpoint.request(peer, MOVED, shard, self._handed.get(shard, 0), told, timeout=self._settings.request_s)
            except PeerTimeoutError:
                continue
            except PeerLostError:
                return
            return

    def _unless_moved(self, handler: Callable[..., Awaitable[Value]]) -> Callable[..., Awaitable[Value]]:
        """The handler of a request about a shard, which says so if another server has it."""

        async def handle(caller: PeerId, shard: Value, *arguments: Value) -> Value:
            if isinstance(shard, int) and shard in self._handed:
                return moved_value(self._handed[shard])
            try:
                return await handler(caller, shard, *arguments)
            except HandedOverError as error:
                return moved_value(error.version)

        return handle

    def _unless_over(self, handler: Callable[..., Awaitable[Value]]) -> Callable[..., Awaitable[Value]]:
        """The handler of a request from a worker that begins, which may come when all others have finished."""

        async def handle(caller: PeerId, *arguments: Value) -> Value:
            if self._done.done():
                raise TooLateError(caller, "the others have trained all there was")
            return await handler(caller, *arguments)

        return handle

    # Changes of the members.

    def _heed(self, view: View) -> None:
        """There is a new view."""
        self._seen.note(view)
        for head in self._heads.values():
            head.heed(view)
        for shard, chain in enumerate(view.chains):
            follower = self._followers.get(shard)
            if follower is None:
                continue
            if chain[:1] == (self._endpoint.peer,):
                assert follower.copy is not None, "only complete copies come into a chain"
                self._forget(shard)
                self._run(self._take_over(shard, follower.copy))
            elif follower.head in view.lost and self._endpoint.peer not in chain:
                self._forget(shard)
        self._drop_gone(view)
        self.maybe_end()

    def _drop_gone(self, view: View) -> None:
        for shard in self._serving:
            head = self._heads[shard]
            for peer, life in self._seen.gone(view, head.copy.lives.training):
                self._run(head.drop(peer, life))

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        givers = self._configured.result().groups[0] if self._configured.done() else self._settings.workers[:1]
        if peer in givers and not self._holds and not self._heads and not self._done.done():
            self._done.set_exception(PeerLostError(peer, reason, waiting_for="its gradients"))
        for head in self._heads.values():
            head.lost(peer, reason)

    def maybe_end(self) -> None:
        """End, if all that train have finished with all shards that are here."""
        heads = self._heads.values()
        followed = [follower.copy for follower in self._followers.values() if follower.copy is not None]
        copies = [*(head.copy for head in heads), *followed]
        finished = self._membership.finished.is_set()
        if self._done.done() or not self._holds or not (copies or finished):
            return
        # One that serves nothing may be needed until the end.
        if all(head.ended for head in heads) and (finished or (heads and all(copy.lives.ended for copy in followed))):
            self._done.set_result(None)
        elif self._halted is not None and all(copy.lives.all_gone for copy in copies):
            self._done.set_exception(self._halted)

    # What workers send.

    async def _take_pushes(self, pushes: Subscription) -> None:
        load = LoadEvents(self._recorder)
        while True:
            sender, tag, payload = await pushes.get()
            load.begin()
            try:
                piece, step = parse_push_tag(tag)
                shard = self._shards.get(piece)
                if sender not in self._settings.workers or shard is None:
                    raise ProtocolError(f"{self._endpoint.peer} does not take piece {piece} from {sender}")
            except ProtocolError as error:
                self._recorder.event("refused", sender=sender, reason=str(error))
                continue
            if shard in self._serving:
                await self._push(self._heads[shard], sender, tag, payload)
            elif shard in self._handed:
                self._run(self._tell_moved(sender, shard, [parameters_tag(piece, step + 1)]))
            else:  # the worker knows of a newer view
                self._parked.setdefault(shard, {})[sender, piece] = sender, tag, payload
            load.done(waiting=pushes.ready, nbytes=payload.nbytes)
            del payload

    async def _push(self, head: Head, sender: PeerId, tag: Tag, payload: Payload) -> None:
        try:
            await head.push(sender, tag, payload)
        except HandedOverError:
            piece, step = parse_push_tag(tag)
            self._run(self._tell_moved(sender, head.copy.number, [parameters_tag(piece, step + 1)]))

    async def _on_configure(self, caller: PeerId, shard: Value, value: Value) -> Value:
        configuration = Configuration.from_value(value)
        if caller != configuration.groups[0][0] or shard != self._settings.index:
            raise ProtocolError(f"{caller} may not configure shard {shard!r:.20} of {self._endpoint.peer}")
        if self._configured.done():
            raise ProtocolError(f"{self._endpoint.peer} is already configured")
        if configuration.elastic is None:
            raise ProtocolError("shards are kept twice, or move, only for workers that may be lost")
        self._configured.set_result(configuration)
        return None

    async def _on_checkpoint(self, caller: PeerId, shard: Value, step: int, show: bool = False, ordered: bool = False) -> Value:
        head = await self._head(shard)
        await head.keep(step, show=show, group=self._group(caller))
        return None

    async def _on_show(self, caller: PeerId, shard: Value, label: str) -> Value:
        await (await self._head(shard)).show(label, self._group(caller))
        return None

    async def _on_again(self, caller: PeerId, shard: Value, life: int, what: str) -> Value:
        await (await self._head(shard)).again(self._group(caller), life, what)
        return None

    async def _on_left(self, caller: PeerId, shard: Value, since: int) -> Value:
        head = await self._head(shard)
        self._group(caller)
        await head.do("rest", caller, since)
        return None

    async def _on_finished(self, caller: PeerId, shard: Value, life: int) -> Value:
        head = await self._head(shard)
        await head.do("finish", caller, life)
        return None

    async def _on_members(self, caller: PeerId, shard: Value, told: Value) -> Value:
        return await (await self._head(shard)).members({peer: life for team in told_teams(told) for peer, life in team.members})

    async def _on_change(self, caller: PeerId, shard: Value, *told: Value) -> Value:
        await (await self._head(shard)).do("change", *told_change(told).to_value())
        return None

    async def _on_history(self, caller: PeerId, shard: Value) -> Value:
        return await (await self._head(shard)).history()

    def _group(self, caller: PeerId) -> int:
        if caller not in self._settings.workers:
            raise ProtocolError(f"{caller} is not a worker of this run")
        return self._settings.workers.index(caller)
