"""The first server of a chain: it numbers what changes the part of the model that it serves, sends that to its backup, and sees to
it that there is one.

A model server serves shards so (`zmqtrain.server.head`), and an FC server the merged layers (`zmqtrain.merged_fc.chain`).
`zmqtrain.server.replication` decides what may be told, `zmqtrain.server.chain_step` which server gets a copy next, or the shard
itself, and this module moves the messages.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from zmqtrain.errors import PeerLostError
from zmqtrain.events import Recorder
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.server.background import ServerTasks
from zmqtrain.server.chain_step import ChainStep, DoWithout, Fill, HandOver, chain_step
from zmqtrain.server.operations import log_tag, over
from zmqtrain.server.replication import Replication, Stage
from zmqtrain.server.stream import FIRST, Stream
from zmqtrain.wire.payload import Payload


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


@dataclass(frozen=True, slots=True)
class _Link:
    """To a backup."""

    stream: Stream
    incarnation: int


@dataclass(frozen=True, slots=True)
class ChainTools:
    """What the first server of a chain works with."""

    endpoint: Endpoint
    membership: Membership
    news: News
    background: ServerTasks
    recorder: Recorder


class ChainHead(ABC):
    """Serves one shard. `run` it as a task: it sees to it that there is a backup, and moves the shard."""

    def __init__(
        self,
        tools: ChainTools,
        number: int,
        lock: asyncio.Lock,
        *,
        copies: bool,
        done: int,
        backups: Callable[[], Sequence[PeerId]],
        joined: PeerId | None = None,
    ) -> None:
        """``number``: of the shard. ``lock``: held while an operation is carried out. ``copies``: whether the run keeps shards
        twice. ``done``: the number of the last operation. ``backups()``: the other servers, by how well they can be its backup.
        ``joined``: a backup that has carried out all operations."""
        self.number, self._lock, self._copies, self._backups = number, lock, copies, backups
        self.handed: int | None = None
        """Set once another server serves the shard: the version of the view since which this is so."""
        self.settled = asyncio.Event()
        """Set once there is a backup, or no server that could be one."""
        self.over = False
        """Set when the server ends: from then on nobody acknowledges an operation."""
        self._endpoint, self._background, self._membership = tools.endpoint, tools.background, tools.membership
        self._news, self._recorder = tools.news, tools.recorder
        self._replication = Replication(done, joined=joined)
        self._gate = HeadGate(self._replication, self._membership.finished)
        self._links: dict[PeerId, _Link] = {}
        self._dismissed: set[PeerId] = set()  # those that are being told that they need no copy any more
        self._began = False  # workers have what they begin with
        self._changed = asyncio.Event()
        if joined is not None:
            self._began = True
            self._join(joined)

    # What is in the chain.

    @abstractmethod
    async def _packed(self) -> list[Payload]:
        """The messages from which another server makes an equal copy; the first one's meta begins with "begin", and no memory of
        theirs changes. Under the lock."""

    @property
    @abstractmethod
    def _served(self) -> bool:
        """Whether all workers have finished."""

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Within it a copy may be made."""
        async with self._lock:
            yield

    def _may_hand_over(self) -> bool:
        """Whether nothing is under way that only this server can end; `_look` is called when that may have changed."""
        return True

    async def _give_away(self, to: PeerId) -> None:
        """``to``, which has carried out the same operations, is to serve the shard from now on. Nothing is carried out meanwhile:
        the caller holds the lock. This head is `handed` over on return, unless the other one was lost."""
        raise NotImplementedError

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
        chain = view.chains[self.number]
        if backup is not None and self._endpoint.peer in chain and backup not in chain:
            self._dismiss(backup)
        self._look()

    def lost(self, peer: PeerId, reason: str) -> None:
        """The link to this peer is lost, with what was on its way."""
        if (link := self._links.get(peer)) is not None:
            link.stream.fail(PeerLostError(peer, reason, waiting_for="what it has of a shard"))
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
        goal = view.goals.get(self.number) if self._began and not self.over else None
        backup, others = self._replication.backup, list[PeerId]()
        if backup is None:
            others = [peer for peer in self._backups() if peer in view.members and peer not in view.leaving]
        return chain_step(self._endpoint.peer, backup, goal, others, copies=self._copies)

    async def _fill(self, backup: PeerId) -> bool:
        """Give ``backup`` a copy, and return when it is in the shard's chain, or lost; False if nothing can be done."""
        number, replication = self.number, self._replication
        began_s = asyncio.get_running_loop().time()
        async with self._still():
            packed = await self._packed() if self._takes_copy(backup) else []
            if not (packed and self._takes_copy(backup)):
                return False
            stream = Stream(self._endpoint, backup, log_tag(number))
            stream.begin(packed)
            self._links[backup] = _Link(stream, self._news.view.members[backup].incarnation)
            replication.fill(backup)
            self._recorder.audit("copied", to=backup)
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
                self._recorder.event("copied", shard=number, to=backup, seconds=seconds, bytes=nbytes)
                self._look()
        return True

    def _takes_copy(self, backup: PeerId) -> bool:
        """Whether a copy may be sent there."""
        return backup in self._news.view.members and not self._served and backup not in self._dismissed

    async def _do_without(self, backup: PeerId) -> bool:
        await self._membership.without_backup(self.number, backup)  # which shows a view without it
        self._dismiss(backup)
        return True

    async def _hand_over(self, to: PeerId) -> bool:
        """Let ``to`` serve the shard, once nothing is under way that only this server can end. Returns False if that is not so
        yet."""
        if not self._may_hand_over():
            return False
        async with self._lock:
            if self._served:
                return False
            while not self._replication.has_all(to) and self._next() == HandOver(to) and self._links[to].stream.lost is None:
                self._changed.clear()
                await self._changed.wait()
            if self._replication.has_all(to) and self._next() == HandOver(to) and self._may_hand_over():
                await self._give_away(to)
        return True

    def _join(self, backup: PeerId) -> None:
        """It has all that this server has: tell it what comes next."""
        member = self._news.view.members.get(backup)
        stream = Stream(self._endpoint, backup, log_tag(self.number))
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
            await self._endpoint.send(backup, log_tag(self.number), over(), priority=FIRST)
        self._dismissed.discard(backup)
        self._look()

    async def _send(self, stream: Stream) -> None:
        await stream.run()
        self._look()

    async def _confirm_loss(self, stream: Stream) -> None:
        """The backup is out of reach. Go on alone only if the coordinator says that it is lost: perhaps this server is."""
        assert stream.lost is not None
        await self._news.until(lambda _: all(link.stream is not stream for link in self._links.values()), stream.lost)

    # Operations.

    async def told(self) -> None:
        """Wait until everything so far may be told."""
        await self._gate.passed(self._gate.ticket())

    def goes_on(self) -> None:
        """All that workers begin with was sent, by this server or by another one: from now on the shard may move."""
        self._began = True
        self._look()

    def finished(self) -> None:
        """All workers have left, as `Membership.finished` says."""
        self._gate.look()

    def _require_here(self) -> None:
        if self.handed is not None:
            raise HandedOverError(self.handed)

    async def _number(self, messages: Callable[[int, bool], Iterable[Payload]]) -> int:
        """The number of an operation, which is sent to the backup, if there is one. ``messages(number, lasting)``: what tells of
        it; ``lasting``: the memory that it came in does not change before the backup has answered. Under the lock."""
        for link in list(self._links.values()):
            await link.stream.room()
        number = self._replication.log()
        for backup, link in self._links.items():
            # While a backup is filled, workers are answered before it has everything, and write anew to their memory.
            for message in messages(number, self._replication.stage(backup) is not Stage.FILLING):
                link.stream.put(message)
        return number
