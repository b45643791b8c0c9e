"""The server of a shard that another server has, too: operations are carried out here and there, and what follows from them is told
once both have them::

    push, request -> operation -> number it, send it to the backup, carry it out -> (both have it) -> parameters, answers

`zmqtrain.server.replication` decides what may be told, and this module moves the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.server_messages import initial_tag, kept_label
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.server.background import Refusals
from zmqtrain.server.operations import Operation, log_tag
from zmqtrain.server.replication import Replication, Stage
from zmqtrain.server.serving import ServerTools
from zmqtrain.server.shard_copy import ShardCopy
from zmqtrain.server.stream import Stream
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


class Head:
    """Serves one shard. `run` it as a task: it sees to it that there is a backup."""

    def __init__(
        self,
        tools: ServerTools,
        copy: ShardCopy,
        membership: Membership,
        news: News,
        backups: Callable[[PeerId], Sequence[PeerId]],
        on_end: Callable[[], None],
    ) -> None:
        """``backups(server)``: the others, by how well they can be its backup. ``on_end``: called whenever it may have `ended`."""
        self._on_end = on_end
        self.copy = copy
        self.settled = asyncio.Event()
        """Set once there is a backup, or no server that could be one."""
        self.over = False
        """Set when the server ends: from then on nobody acknowledges an operation."""
        self._tools, self._endpoint, self._background = tools, tools.endpoint, tools.background
        self._membership, self._news, self._backups = membership, news, backups
        self._refusals = Refusals(tools.endpoint, "refused", tools.recorder, tools.background, timeout_s=tools.settings.request_s)
        self._replication = Replication(copy.done)
        self._gate = HeadGate(self._replication, membership.finished)
        self._stream: Stream | None = None
        self._asked = 0  # operations whose callers wait for an answer
        self._incarnation: int | None = None  # of the backup
        self._changed = asyncio.Event()
        copy.serving.gate = self._gate
        for step in copy.kept:
            self._save(step)

    # What workers ask for.

    async def push(self, sender: PeerId, tag: Tag, payload: Payload) -> None:
        """A worker pushes a gradient; perhaps once more, since the server of the shard was lost before it had an answer."""
        copy, operation = self.copy, Operation.push(sender, tag, payload)
        serving = copy.serving
        try:
            async with copy.lock:
                push = copy.parse(operation)
                if serving.lives.get(push.group) != push.life:
                    return
                standing = serving.aggregator.standing(push.piece, push.group, push.step)
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
        """Carry out an operation; on return the backup has it, too."""
        self._asked += 1
        try:
            async with self.copy.lock:
                await self._do(kind, *arguments)
            await self.told()
        finally:
            self._asked -= 1
        if self.ended:
            self._on_end()

    def finished(self) -> None:
        """All workers have left, as `Membership.finished` says."""
        self._gate.look()

    async def told(self) -> None:
        """Wait until everything so far may be told."""
        await self._gate.passed(self._gate.ticket())

    async def drop(self, peer: PeerId, life: int) -> None:
        """This process is lost."""
        async with self.copy.lock:
            if self.copy.lives.training.get(peer) == life:
                await self._do("drop", peer, life)

    async def members(self, present: dict[PeerId, int]) -> Value:
        """Go on without those that are not ``present``, and say how far they have got."""
        lives = self.copy.lives
        async with self.copy.lock:
            for peer, life in lives.others(present):
                await self._do("drop", peer, life)
            progress = lives.progress(present.items())
        await self.told()
        return progress

    async def keep(self, step: int, *, show: bool, group: int) -> None:
        """Keep the state for a checkpoint, and show it to the group."""
        copy = self.copy
        async with copy.lock:
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
            self.copy.show(label, group)

    async def begin(self) -> None:
        """Send all groups the initial values."""
        copy = self.copy
        async with copy.lock:
            copy.serving.begin()

    async def again(self, group: int, life: int, what: str) -> None:
        """Send a process what it waits for, and may have missed: initial values, those for its first step, or those shown."""
        copy = self.copy
        serving = copy.serving
        async with copy.lock:
            if serving.lives.get(group) != life:
                return
            for piece in copy.shard.entries:
                if what == "initial":
                    serving.send_values(group, piece, initial_tag(piece))
                elif what == "entered" and (piece, life) not in serving.admitted and not serving.aggregator.enters(piece, group):
                    serving.admit(group, piece)

    # Checkpoints.

    def _save(self, step: int) -> None:
        if self._tools.checkpoints is not None:
            self._background.spawn(self._write(step))

    async def _write(self, step: int) -> None:
        checkpoints, kept = self._tools.checkpoints, self.copy.kept[step]
        assert checkpoints is not None
        await checkpoints.save(step, kept.tensors, kept.sidecar)
        if not self.over:
            self._background.run(self._free(step))

    async def _free(self, step: int) -> None:
        """Once the checkpoint is complete, nobody needs the state any more."""
        assert self._tools.checkpoints is not None
        await self._tools.checkpoints.committed(step)
        await self.do("free", step)

    # The backup.

    async def run(self) -> None:
        """Find a backup whenever there is none, as long as there is a server that can be one."""
        while True:
            self._changed.clear()
            if self._replication.stage is Stage.ALONE:
                backup = self._next_backup(self._news.view)
                if backup is not None:
                    await self._fill(backup)
                    continue
                self.settled.set()
            elif self._stream is not None and self._stream.lost is not None:
                await self._confirm_loss(self._stream)
                continue
            await self._changed.wait()

    def heed(self, view: View) -> None:
        """There is a new view of the members."""
        backup = self._replication.backup
        if backup is not None:
            member = view.members.get(backup)
            gone = backup in view.lost if member is None else member.incarnation != self._incarnation
            if gone:
                self._replication.lose()
                if self._stream is not None:
                    self._stream.close()
                    self._stream = None
        self._look()

    def acknowledge(self, backup: PeerId, number: int) -> None:
        """``backup`` has carried out all operations up to this number."""
        self._replication.acknowledge(backup, number)
        self._look()

    def _look(self) -> None:
        self._gate.look()
        self._changed.set()

    def _next_backup(self, view: View) -> PeerId | None:
        return next((peer for peer in self._backups(self._endpoint.peer) if peer in view.members), None)

    async def _fill(self, backup: PeerId) -> None:
        """Give ``backup`` a copy, and return when it is in the shard's chain, or lost."""
        number, replication = self.copy.number, self._replication
        async with self.copy.lock:
            member = self._news.view.members.get(backup)
            if member is None or self.copy.lives.ended:
                return
            self._incarnation = member.incarnation
            stream = self._stream = Stream(self._endpoint, backup, log_tag(number))
            stream.begin(self.copy.packed())
            replication.fill(backup)
            self.copy.recorder.audit("copied", to=backup)
            self._background.run(self._send(stream))
        while replication.stage in (Stage.FILLING, Stage.JOINING) and stream.lost is None:
            self._changed.clear()
            await self._changed.wait()
        if replication.stage is Stage.COMPLETE:
            try:
                await self._membership.has_backup(number, backup)
            except PeerLostError as error:
                if error.peer != backup:
                    raise
                await self._news.until(lambda _: replication.backup is None, error)
                return
            if replication.stage is Stage.COMPLETE:
                replication.join()
                self.settled.set()

    async def _send(self, stream: Stream) -> None:
        await stream.run()
        self._look()

    async def _confirm_loss(self, stream: Stream) -> None:
        """The backup is out of reach. Go on alone only if the coordinator says that it is lost: perhaps this server is."""
        assert stream.lost is not None
        await self._news.until(lambda _: self._stream is not stream, stream.lost)

    # Operations. All under the lock.

    async def _do(self, kind: str, *arguments: Value) -> None:
        operation = Operation(kind, arguments)
        await self.copy.perform(operation, await self._log(operation))

    async def _log(self, operation: Operation) -> int:
        """Number the operation, and send it to the backup, if there is one."""
        if self._stream is not None:
            await self._stream.room()
        number = self._replication.log()
        if self._stream is not None:
            # While the backup is filled, workers are answered before it has everything, and write their gradients anew.
            self._stream.put(operation.message(number, lasting=self._replication.stage is not Stage.FILLING))
        return number
