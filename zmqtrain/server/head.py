"""The server of a shard that another server has, too: operations are carried out here and there, and what follows from them is told
once both have them::

    push, request -> operation -> number it, send it to the backup, carry it out -> (both have it) -> parameters, answers

`zmqtrain.server.replication` decides what may be told, `zmqtrain.server.chain_step` which server gets a copy next, or the shard
itself, and this module moves the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.server_messages import ENTERED, entered_tag, initial_tag, kept_label, parameters_tag
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.server.background import Refusals
from zmqtrain.server.chain_step import ChainStep, DoWithout, Fill, HandOver, chain_step
from zmqtrain.server.operations import Operation, log_tag, over
from zmqtrain.server.replication import Replication, Stage
from zmqtrain.server.serving import ServerTools
from zmqtrain.server.shard_copy import ShardCopy
from zmqtrain.server.stream import FIRST, Stream
from zmqtrain.wire.payload import Payload, Value


class HeadGate:
    """Implements `zmqtrain.server.gate.Gate`: what follows from an operation passes once the backup has it, or once all workers
    have left: then nobody will need a backup, which may have ended before it acknowledged the last operations."""

    shut = False

    def __init__(self, replication: Replication, finished: asyncio.Event) -> None:
        """``finished``: set when all workers have left; then call `look`."""
        self._replication, self._finished = replication, finished
        self._changed = asyncio.Event()

    def ticket(self) -> int:
        return self._replication.last

    async def passed(self, ticket: int) -> None:
        while not (self._finished.is_set() or self._replication.is_out(ticket)):
            await self._changed.wait()

    def look(self) -> None:
        """The replication has changed, or all workers have left."""
        self._changed.set()
        self._changed = asyncio.Event()


class HandedOverError(Exception):
    """Another server serves the shard from now on."""

    def __init__(self, version: int) -> None:
        super().__init__(f"another server serves the shard since the view of version {version}")
        self.version = version


class Server(Protocol):
    """What a head needs of the server that it is part of."""

    @property
    def backups(self) -> Sequence[PeerId]:
        """The others, by how well they can be its backup."""
        ...

    def maybe_end(self) -> None:
        """A head may have `ended`."""
        ...

    async def give_away(self, head: Head, to: PeerId) -> None:
        """``to``, which has carried out the same operations, is to serve the shard from now on. Nothing is carried out meanwhile:
        the caller holds the lock. The head is `handed` over on return, unless the other one was lost."""
        ...


@dataclass(frozen=True, slots=True)
class _Link:
    """To a backup."""

    stream: Stream
    incarnation: int


class Head:
    """Serves one shard. `run` it as a task: it sees to it that there is a backup, and moves the shard."""

    def __init__(
        self,
        tools: ServerTools,
        copy: ShardCopy,
        membership: Membership,
        news: News,
        server: Server,
        *,
        copies: bool,
        joined: PeerId | None = None,
    ) -> None:
        """``copies``: whether the run keeps shards twice. ``joined``: a backup that has carried out all that ``copy`` has."""
        self._server, self._copies = server, copies
        self.copy = copy
        self.handed: int | None = None
        """Set once another server serves the shard: the version of the view since which this is so."""
        self.settled = asyncio.Event()
        """Set once there is a backup, or no server that could be one."""
        self.over = False
        """Set when the server ends: from then on nobody acknowledges an operation."""
        self._tools, self._endpoint, self._background = tools, tools.endpoint, tools.background
        self._membership, self._news = membership, news
        self._refusals = Refusals(tools.endpoint, "refused", tools.recorder, tools.background, timeout_s=tools.settings.request_s)
        self._replication = Replication(copy.done, joined=joined)
        self._gate = HeadGate(self._replication, membership.finished)
        self._links: dict[PeerId, _Link] = {}
        self._dismissed: set[PeerId] = set()  # those that are being told that they need no copy any more
        self._asked = 0  # operations whose callers wait for an answer
        self._began = False  # workers have what they begin with
        self._writing = 0  # checkpoints that are on their way to the disk
        self._changed = asyncio.Event()
        copy.serving.gate = self._gate
        copy.serving.owed.clear()
        if joined is not None:
            self._began = True
            self._join(joined)
        for step in copy.kept:
            self._save(step)

    # What workers ask for.

    async def push(self, sender: PeerId, tag: Tag, payload: Payload) -> None:
        """A worker pushes a gradient; perhaps once more, since the server of the shard was lost before it had an answer. Raises
        `HandedOverError`."""
        copy, operation = self.copy, Operation.push(sender, tag, payload)
        serving = copy.serving
        try:
            async with copy.lock:
                self._require_here()  # before it is compared with what is here, which may be older by now
                push = copy.parse(operation)
                if serving.lives.get(push.group) != push.life:
                    return
                standing = serving.aggregator.standing(push.piece, push.group, push.step)
                if serving.answered.get((push.group, push.piece)) != push.step + 1:
                    serving.owed.add((sender, parameters_tag(push.piece, push.step + 1)))
                if standing == "new":
                    serving.check_present(push)
                    number = await self._log(operation)
                    await copy.perform(operation, number, push)
                elif standing == "answered" and serving.answered.get((push.group, push.piece)) != push.step + 1:
                    serving.answer(push.group, push.piece, push.step + 1)
        except ProtocolError as error:
            self._refusals.refuse(sender, tag, error)

    @property
    def ended(self) -> bool:
        """Whether all workers have finished, and know that this is so."""
        return self.copy.lives.ended and not self._asked

    async def do(self, kind: str, *arguments: Value) -> None:
        """Carry out an operation; on return the backup has it, too. Like all that workers ask for, it raises `HandedOverError` if
        another server serves the shard."""
        self._asked += 1
        try:
            async with self.copy.lock:
                await self._do(kind, *arguments)
            await self.told()
        finally:
            self._asked -= 1
        if self.ended:
            self._server.maybe_end()

    def finished(self) -> None:
        """All workers have left, as `Membership.finished` says."""
        self._gate.look()

    async def told(self) -> None:
        """Wait until everything so far may be told."""
        await self._gate.passed(self._gate.ticket())

    async def drop(self, peer: PeerId, life: int) -> None:
        """This process is lost."""
        async with self.copy.lock:
            if self.handed is None and self.copy.lives.training.get(peer) == life:
                await self._do("drop", peer, life)

    async def members(self, present: dict[PeerId, int]) -> Value:
        """Go on without those that are not ``present``, and say how far they have got."""
        lives = self.copy.lives
        async with self.copy.lock:
            self._require_here()
            for peer, life in lives.others(present):
                await self._do("drop", peer, life)
            progress = lives.progress(present.items())
        await self.told()
        return progress

    async def keep(self, step: int, *, show: bool, group: int) -> None:
        """Keep the state for a checkpoint, and show it to the group."""
        copy = self.copy
        async with copy.lock:
            self._require_here()
            if step not in copy.kept_ever:
                await self._do("keep", step, show)
                if step in copy.kept:
                    self._save(step)
            if show:
                copy.show(kept_label(step), group)
        await self.told()

    async def show(self, label: str, group: int) -> None:
        """Send the group the values of one moment."""
        async with self.copy.lock:
            self._require_here()
            self.copy.show(label, group)

    async def begin(self) -> None:
        """Send all groups the initial values."""
        copy = self.copy
        async with copy.lock:
            copy.serving.begin()
        self.goes_on()

    def goes_on(self) -> None:
        """All that workers begin with was sent, by this server or by another one: from now on the shard may move."""
        self._began = True
        self._look()

    async def history(self) -> Value:
        """What the run began with, and all changes of the members since."""
        async with self.copy.lock:
            self._require_here()
            history = self.copy.lives.history()
        await self.told()
        return history

    async def again(self, group: int, life: int, what: str) -> None:
        """Send a process what it waits for, and may have missed: initial values, those for its first step, or those shown."""
        copy = self.copy
        serving = copy.serving
        async with copy.lock:
            self._require_here()
            if serving.lives.get(group) != life:
                return
            for piece in copy.shard.entries:
                if what == "initial":
                    serving.send_values(group, piece, initial_tag(piece))
                elif what == "entered" and (piece, life) not in serving.admitted:
                    if serving.aggregator.enters(piece, group):
                        serving.owed.add((serving.peer_of(group, piece), entered_tag(piece, life)))
                    else:
                        serving.admit(group, piece)

    def _require_here(self) -> None:
        if self.handed is not None:
            raise HandedOverError(self.handed)

    # Checkpoints.

    def _save(self, step: int) -> None:
        if self._tools.checkpoints is not None:
            self._background.spawn(self._write(step))

    async def _write(self, step: int) -> None:
        checkpoints, kept = self._tools.checkpoints, self.copy.kept[step]
        assert checkpoints is not None
        self._writing += 1
        try:
            await checkpoints.save(step, kept.tensors, kept.sidecar)
        finally:
            self._writing -= 1
            self._changed.set()
        if not self.over and self.handed is None:
            self._background.run(self._free(step))

    async def _free(self, step: int) -> None:
        """Once the checkpoint is complete, nobody needs the state any more."""
        assert self._tools.checkpoints is not None
        await self._tools.checkpoints.committed(step)
        with suppress(HandedOverError):  # the other one waits for that, too
            await self.do("free", step)

    # The chain.

    async def run(self) -> None:
        """Find a backup whenever there is none, as long as there is a server that can be one; and move the shard to where it is to
        be."""
        while self.handed is None:
            self._changed.clear()
            lost = next((link.stream for link in self._links.values() if link.stream.lost is not None), None)
            if lost is not None:
                await self._confirm_loss(lost)
                continue
            match step := self._next():
                case Fill(backup):
                    if await self._fill(backup):
                        continue
                case HandOver(to):
                    if await self._hand_over(to):
                        continue
                case DoWithout(backup):
                    if await self._do_without(backup):
                        continue
            if step is None:
                self.settled.set()
            await self._changed.wait()

    def heed(self, view: View) -> None:
        """There is a new view of the members."""
        for peer, link in list(self._links.items()):
            member = view.members.get(peer)
            gone = peer in view.lost if member is None else member.incarnation != link.incarnation
            if gone:
                self._drop(peer)
        backup = self._replication.backup
        chain = view.chains[self.copy.number]
        if backup is not None and self._endpoint.peer in chain and backup not in chain:
            self._dismiss(backup)
        self._look()

    def acknowledge(self, backup: PeerId, number: int) -> None:
        """``backup`` has carried out all operations up to this number."""
        self._replication.acknowledge(backup, number)
        self._look()

    def hand_over(self, version: int) -> None:
        """Another server serves the shard, since the view of this version."""
        self.handed = version
        for link in self._links.values():
            link.stream.close()
        self._look()

    def _look(self) -> None:
        self._gate.look()
        self._changed.set()

    def _next(self) -> ChainStep | None:
        view = self._news.view
        goal = view.goals.get(self.copy.number) if self._began and not self.over else None
        backup, others = self._replication.backup, list[PeerId]()
        if backup is None:
            others = [peer for peer in self._server.backups if peer in view.members and peer not in view.leaving]
        return chain_step(self._endpoint.peer, backup, goal, others, copies=self._copies)

    async def _fill(self, backup: PeerId) -> bool:
        """Give ``backup`` a copy, and return when it is in the shard's chain, or lost; False if nothing can be done."""
        number, replication = self.copy.number, self._replication
        began_s = asyncio.get_running_loop().time()
        async with self.copy.lock:
            member = self._news.view.members.get(backup)
            if member is None or self.copy.lives.ended or backup in self._dismissed:
                return False
            stream = Stream(self._endpoint, backup, log_tag(number))
            packed = self.copy.packed()
            stream.begin(packed)
            self._links[backup] = _Link(stream, member.incarnation)
            replication.fill(backup)
            self.copy.recorder.audit("copied", to=backup)
            self._background.run(self._send(stream))
        while replication.stage(backup) in (Stage.FILLING, Stage.JOINING) and stream.lost is None:
            self._changed.clear()
            await self._changed.wait()
        if replication.stage(backup) is Stage.COMPLETE:
            try:
                await self._membership.has_backup(number, backup)
            except PeerLostError as error:
                if error.peer != backup:
                    raise
                await self._news.until(lambda _: replication.stage(backup) is Stage.ALONE, error)
                return True
            if replication.stage(backup) is Stage.COMPLETE:
                before = replication.join(backup)
                if before is not None:
                    self._dismiss(before)
                self.settled.set()
                seconds, nbytes = asyncio.get_running_loop().time() - began_s, sum(payload.nbytes for payload in packed)
                self.copy.recorder.event("copied", shard=number, to=backup, seconds=seconds, bytes=nbytes)
                self._look()
        return True

    async def _do_without(self, backup: PeerId) -> bool:
        await self._membership.without_backup(self.copy.number, backup)  # which shows a view without it
        self._dismiss(backup)
        return True

    async def _hand_over(self, to: PeerId) -> bool:
        """Let ``to`` serve the shard, once nothing is under way that only this server can end. Returns False if that is not so
        yet."""
        serving = self.copy.serving
        there = serving.lives.values()
        if self._writing or any(tag[0] == ENTERED and tag[2] in there for _, tag in serving.owed):
            serving.on_sent = self._changed.set  # of what a worker begins with
            return False
        async with self.copy.lock:
            if self.copy.lives.ended:
                return False
            while not self._replication.has_all(to) and self._next() == HandOver(to) and self._links[to].stream.lost is None:
                self._changed.clear()
                await self._changed.wait()
            if self._replication.has_all(to) and self._next() == HandOver(to) and not self._writing:
                await self._server.give_away(self, to)
        return True

    def _join(self, backup: PeerId) -> None:
        """It has all that this server has: tell it what comes next."""
        member = self._news.view.members.get(backup)
        stream = Stream(self._endpoint, backup, log_tag(self.copy.number))
        self._links[backup] = _Link(stream, 0 if member is None else member.incarnation)
        self._background.run(self._send(stream))

    def _drop(self, backup: PeerId) -> None:
        self._replication.lose(backup)
        self._links.pop(backup).stream.close()

    def _dismiss(self, backup: PeerId) -> None:
        """It is not a backup any more, and is told so."""
        self._replication.lose(backup)
        if (link := self._links.pop(backup, None)) is not None:
            link.stream.close()
            self._dismissed.add(backup)
            self._background.run(self._tell_over(backup))
        self._look()

    async def _tell_over(self, backup: PeerId) -> None:
        with suppress(PeerLostError):
            await self._endpoint.send(backup, log_tag(self.copy.number), over(), priority=FIRST)
        self._dismissed.discard(backup)
        self._look()

    async def _send(self, stream: Stream) -> None:
        await stream.run()
        self._look()

    async def _confirm_loss(self, stream: Stream) -> None:
        """The backup is out of reach. Go on alone only if the coordinator says that it is lost: perhaps this server is."""
        assert stream.lost is not None
        await self._news.until(lambda _: all(link.stream is not stream for link in self._links.values()), stream.lost)

    # Operations. All under the lock.

    async def _do(self, kind: str, *arguments: Value) -> None:
        self._require_here()
        operation = Operation(kind, arguments)
        await self.copy.perform(operation, await self._log(operation))

    async def _log(self, operation: Operation) -> int:
        """Number the operation, and send it to the backup, if there is one."""
        for link in list(self._links.values()):
            await link.stream.room()
        number = self._replication.log()
        for backup, link in self._links.items():
            # While a backup is filled, workers are answered before it has everything, and write their gradients anew.
            link.stream.put(operation.message(number, lasting=self._replication.stage(backup) is not Stage.FILLING))
        return number
