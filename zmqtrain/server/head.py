"""The server of a shard that another server has, too: operations are carried out here and there, and what follows from them is told
once both have them::

    push, request -> operation -> number it, send it to the backup, carry it out -> (both have it) -> parameters, answers

`zmqtrain.server.chain_head` does what is the same for whatever is in a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.server_messages import ENTERED, entered_tag, initial_tag, kept_label, parameters_tag
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.server.background import Refusals
from zmqtrain.server.chain_head import ChainHead, ChainTools, HandedOverError
from zmqtrain.server.operations import Operation
from zmqtrain.server.serving import ServerTools
from zmqtrain.server.shard_copy import ShardCopy
from zmqtrain.wire.payload import Payload, Value


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


class Head(ChainHead):
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
        chain = ChainTools(tools.endpoint, membership, news, tools.background, copy.recorder)
        super().__init__(
            chain, copy.number, copy.lock, copies=copies, done=copy.done, backups=lambda: server.backups, joined=joined
        )
        self._server, self._tools, self.copy = server, tools, copy
        self._refusals = Refusals(tools.endpoint, "refused", tools.recorder, tools.background, timeout_s=tools.settings.request_s)
        self._asked = 0  # operations whose callers wait for an answer
        self._writing = 0  # checkpoints that are on their way to the disk
        copy.serving.gate = self._gate
        copy.serving.owed.clear()
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

    # zmqtrain.server.chain_head.ChainHead

    async def _packed(self) -> list[Payload]:
        return self.copy.packed()

    @property
    def _served(self) -> bool:
        return self.copy.lives.ended

    def _may_hand_over(self) -> bool:
        serving = self.copy.serving
        there = serving.lives.values()
        if self._writing or any(tag[0] == ENTERED and tag[2] in there for _, tag in serving.owed):
            serving.on_sent = self._changed.set  # of what a worker begins with
            return False
        return True

    async def _give_away(self, to: PeerId) -> None:
        await self._server.give_away(self, to)

    # Operations. All under the lock.

    async def _do(self, kind: str, *arguments: Value) -> None:
        self._require_here()
        operation = Operation(kind, arguments)
        await self.copy.perform(operation, await self._log(operation))

    async def _log(self, operation: Operation) -> int:
        """Number the operation, and send it to the backup, if there is one."""
        return await self._number(lambda number, lasting: [operation.message(number, lasting=lasting)])
