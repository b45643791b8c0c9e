"""The merged layers on two FC servers: one serves, and the other one has an equal copy.

Both carry out the same operations in the same order (`zmqtrain.merged_fc.server`), as two copies of a shard do; the shard of the
merged layers is the one after those of the model servers. The backup acknowledges what it has received, so both compute a turn at
the same time, and a worker is answered when the server has computed it and the backup has what it was computed from. If the
server is lost, the backup carries out what it has received, and serves: workers send again what had no answer, and what the lost
server had passed on is answered, and not computed again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.checkpoint_part import copy_of_received, pack_manifest, unpack_manifest
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.membership.view import View
from zmqtrain.merged_fc.executor import BatchPart, ExecutorState
from zmqtrain.merged_fc.messages import ActivationsMeta, AnswerMeta
from zmqtrain.merged_fc.queue import Turn
from zmqtrain.merged_fc.server import Answered, FcServer
from zmqtrain.net.endpoint import EndingError, PeerId, Subscription
from zmqtrain.server.chain_head import ChainHead, ChainTools
from zmqtrain.server.gate import ShutGate
from zmqtrain.server.operations import LOG, LOGGED, logged_tag, own_copy
from zmqtrain.server.shard_copy import CopyRecorder
from zmqtrain.server.stream import FIRST
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

#: By how many turns for each group the backup may be behind: a slower one slows training down, and its memory is bounded.
MOST_BEHIND = 2


class FcHead(ChainHead):
    """The FC server that workers ask."""

    def __init__(self, tools: ChainTools, number: int, server: FcServer, *, done: int, backups: Sequence[PeerId]) -> None:
        """``done``: the number of the last operation. ``backups``: the other FC servers."""
        super().__init__(tools, number, server.lock, copies=True, done=done, backups=lambda: backups)
        self._server = server
        server.gate = self._gate

    async def log(self, kind: str, *arguments: Any) -> None:
        """Number the operation, and send it to the backup, if there is one."""
        await self._number(lambda number, _: [ValuePayload([kind, number, *arguments])])

    async def log_turn(self, sender: PeerId, turn: Turn, part: BatchPart) -> None:
        """The same of a turn."""
        about: list[Value] = [turn.group, turn.step, turn.micro_batch, [*turn.positions], turn.last, turn.counts]

        def messages(number: int, lasting: bool) -> Iterator[Payload]:
            yield ValuePayload(["turn", number, sender, about, part.meta.to_value()])
            for tensor in part.tensors:
                yield (tensor if lasting else own_copy(tensor)).with_meta(["tensor", number])

        await self._number(messages)

    # zmqtrain.server.chain_head.ChainHead

    async def _packed(self) -> list[Payload]:
        return await packed(self._server, self._replication.last)

    @property
    def _served(self) -> bool:
        assert self._server.seats is not None
        return self._server.seats.ended

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """When no gradients wait for those of other groups: they have no place in a copy."""
        while True:
            async with self._lock:
                if not self._server.queue.unapplied:
                    yield
                    return
                applied = self._server.applied
            await applied.wait()


class FcChain:
    """Implements `zmqtrain.merged_fc.server.FcCopies`."""

    def __init__(self, server: FcServer, membership: Membership, number: int, others: Sequence[PeerId], *, first: bool) -> None:
        """``number``: of the merged layers among the shards. ``others``: the other FC servers. ``first``: whether the run begins
        with this one."""
        self.serves = first and not membership.late
        self._server, self._membership, self._number, self._others = server, membership, number, others
        self._news = News(membership)
        self._head: FcHead | None = None
        self._from: PeerId | None = None  # who sends what follows
        self._incoming: _Incoming | None = None
        self._turn: _Turn | None = None  # the one that is arriving
        self._operations: deque[tuple[int, str, Sequence[Any]] | _Turn] = deque()
        self._has_copy = False
        self._received = self._done = self._told = 0  # numbers of operations
        self._moved = asyncio.Event()  # replaced whenever one of these has changed
        self._most_behind = 0
        server.copies = self
        server.recorder = CopyRecorder(server.recorder, number)
        if not self.serves:
            server.gate = ShutGate()

    async def run(self) -> None:
        endpoint = self._server.endpoint
        log, logged = endpoint.subscribe(LOG), endpoint.subscribe(LOGGED)
        self._membership.on_view(self._heed)
        self._heed(self._news.view)
        try:
            await together(
                self._take_log(log), self._take_logged(logged), self._perform(), self._acknowledge(), self._finish()
            )  # fmt: skip
        finally:
            log.close()
            logged.close()

    # zmqtrain.merged_fc.server.FcCopies

    async def settled(self) -> None:
        await self._serve(0).settled.wait()

    async def log(self, kind: str, *arguments: Any) -> None:
        assert self._head is not None
        await self._head.log(kind, *arguments)

    async def log_turn(self, sender: PeerId, turn: Turn, part: BatchPart) -> None:
        assert self._head is not None
        await self._head.log_turn(sender, turn, part)

    def lost(self, peer: PeerId, reason: str) -> None:
        if self._head is not None:
            self._head.lost(peer, reason)

    # The server that workers ask.

    def _serve(self, done: int) -> FcHead:
        server = self._server
        tools = ChainTools(server.endpoint, self._membership, self._news, server.background, server.recorder)
        head = self._head = FcHead(tools, self._number, server, done=done, backups=self._others)
        self._heed(self._news.view)
        server.background.run(head.run())
        return head

    async def _take_logged(self, logged: Subscription) -> None:
        async for sender, _, payload in logged:
            match payload.meta:
                case [int(number)]:
                    if self._head is not None:
                        self._head.acknowledge(sender, number)
                case other:
                    raise ProtocolError(f"{sender} sent {other!r:.60} as what it has of the merged layers")

    def _heed(self, view: View) -> None:
        own, chain = self._server.endpoint.peer, view.chains[self._number]
        if self._head is not None:
            self._head.heed(view)
        elif chain[:1] == (own,) and not self.serves:
            assert self._has_copy, "only complete copies come into a chain"
            self.serves, self._from = True, None
            with suppress(EndingError):
                self._server.background.run(self._take_over())

    async def _take_over(self) -> None:
        """The other server is lost: carry out what it has passed on, and serve."""
        server = self._server
        while self._operations or self._done < self._received:
            await self._moved.wait()
        async with server.lock:
            head = self._serve(self._done)
        reason = f"{server.endpoint.peer} computes the merged layers from now on"
        server.recorder.event("took over", shard=self._number, updates=server.queue.version, reason=reason)
        for step, version in server.unsaved.items():
            server.background.spawn(server.save(step, server.kept[step].result(), version))
        assert server.seats is not None
        server.seats.take_over()
        head.goes_on()

    async def _finish(self) -> None:
        """Once all workers have left: nobody needs the copy any more."""
        await self._membership.finished.wait()
        if self._head is not None:
            self._head.finished()
        else:
            self._server.end()

    # The copy.

    async def _take_log(self, log: Subscription) -> None:
        async for sender, _, payload in log:
            if sender not in self._others:
                raise ProtocolError(f"{sender} sent what only FC servers may")
            if self.serves:
                continue  # the sender does not know yet that it counts as lost
            match payload.meta:
                case ["begin", int(number)]:
                    self._forget()
                    self._from, self._incoming = sender, _Incoming(payload, number)
                case _ if sender != self._from:
                    continue
                case ["over"]:
                    self._forget()
                case ["tensor", _] if self._incoming is not None:
                    self._incoming.take(payload)
                case ["tensor", _] if self._turn is not None:
                    self._turn.tensors.append(payload)
                    self._turn_came()
                case ["ready", _] if self._incoming is not None:
                    await self._load(self._incoming)
                case ["turn", int(number), str(worker), [group, step, micro, [*positions], last, counts], meta]:
                    turn = Turn(group, step, micro, tuple(positions), last, counts)  # type: ignore[arg-type]
                    self._turn = _Turn(number, worker, turn, ActivationsMeta.from_value(meta))
                    self._turn_came()
                case [str(kind), int(number), *arguments] if self._incoming is None and self._turn is None:
                    self._came(number, (number, kind, arguments))
                case other:
                    raise ProtocolError(f"{sender} sent {other!r:.60} as an operation on the merged layers")

    def _forget(self) -> None:
        self._from = self._incoming = self._turn = None
        self._operations.clear()
        self._has_copy = False
        self._received = self._done = self._told = 0

    async def _load(self, incoming: _Incoming) -> None:
        server, sidecar = self._server, incoming.sidecar
        assert server.seats is not None
        async with server.lock:
            await server.executor.become(incoming.state("now", sidecar["now"]))
            server.queue.load(sidecar["queue"])
            server.seats.load(sidecar["seats"])
            server.kept.clear()
            for step, about in sidecar["kept"]:
                kept = server.kept[step] = asyncio.get_running_loop().create_future()
                kept.set_result(incoming.state(f"kept/{step}", about))
            server.unsaved = dict(sidecar["unsaved"])
            server.saved = set(sidecar["saved"])
            server.held_by = sidecar["held_by"]
            server.answered = {answered.turn.group: answered for answered in incoming.answered()}
        self._received = self._done = incoming.done
        self._told = -1
        self._incoming, self._has_copy = None, True
        self._most_behind = MOST_BEHIND * len(sidecar["queue"]["steps"])
        self._note()

    def _turn_came(self) -> None:
        """A part of a turn has arrived."""
        if self._turn is not None and len(self._turn.tensors) == self._turn.meta.tensors:
            turn, self._turn = self._turn, None
            self._came(turn.number, turn)

    def _came(self, number: int, operation: tuple[int, str, Sequence[Any]] | _Turn) -> None:
        if number != self._received + 1:
            raise ProtocolError(f"operation {number} on the merged layers came after operation {self._received}")
        self._received = number
        self._operations.append(operation)
        self._note()

    async def _perform(self) -> None:
        """Carry out what has come."""
        server = self._server
        while True:
            if not self._operations:
                await self._moved.wait()
                continue
            async with server.lock:
                if not self._operations:  # another copy has begun meanwhile
                    continue
                operation = self._operations[0]
                if isinstance(operation, _Turn):
                    await server.perform_turn(operation.worker, operation.turn, BatchPart(operation.meta, tuple(operation.tensors)))
                    number = operation.number
                else:
                    number, kind, arguments = operation
                    await server.perform(kind, *arguments)
                del operation
                if self._operations:
                    self._operations.popleft()
                    self._done = number
            self._note()

    async def _acknowledge(self) -> None:
        """Tell the server of the layers how far the copy here has got."""
        while True:
            reached, to = min(self._received, self._done + self._most_behind), self._from
            if to is None or not self._has_copy or reached <= self._told:
                await self._moved.wait()
                continue
            self._told = reached
            try:
                await self._server.endpoint.send(to, logged_tag(self._number), ValuePayload([reached]), priority=FIRST)
            except PeerLostError as error:
                # A view will say so. If none does, only the link is lost, and the other one would wait for ever.
                await self._news.until(lambda view, to=to: self._from != to or to in view.lost, error)  # type: ignore[misc]

    def _note(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


@dataclass(slots=True)
class _Turn:
    """A turn that the server of the layers has had."""

    number: int
    worker: PeerId
    turn: Turn
    meta: ActivationsMeta
    tensors: list[Payload] = field(default_factory=list)


async def packed(server: FcServer, done: int) -> list[Payload]:
    """The messages from which another FC server makes an equal copy. Under the lock. ``done``: the number of the last operation."""
    assert server.seats is not None
    kept = {step: state.result() for step, state in server.kept.items() if state.done() and not state.cancelled()}
    now = await server.executor.state()
    payloads: dict[str, Payload] = {**_payloads("now", now)}
    answered: list[Value] = []
    for step, state in kept.items():
        payloads |= _payloads(f"kept/{step}", state)
    for group, each in server.answered.items():
        turn = each.turn
        about: list[Value] = [turn.group, turn.step, turn.micro_batch, [*turn.positions], turn.last, turn.counts]
        answered.append([about, each.life, each.answer.to_value()])
        payloads |= {f"answer/{group}/{place}": gradient for place, gradient in enumerate(each.gradients)}
    sidecar: dict[str, Any] = {
        "now": now.sidecar,
        "kept": [[step, state.sidecar] for step, state in kept.items()],
        "unsaved": [[step, version] for step, version in server.unsaved.items()],
        "saved": sorted(server.saved),
        "held_by": server.held_by,
        "queue": server.queue.state(),
        "seats": server.seats.state(),
        "answered": answered,
    }
    return [
        pack_manifest(payloads, sidecar).with_meta(["begin", done]),
        *(payload.with_meta(["tensor", 0]) for payload in payloads.values()),
        ValuePayload(["ready", done]),
    ]


def _payloads(name: str, state: ExecutorState) -> dict[str, Payload]:
    return {
        f"{name}/{kind}/{key}": TensorPayload.of(tensor)
        for kind, tensors in (("model", state.model), ("more", state.more))
        for key, tensor in tensors.items()
    }


class _Incoming:
    """A copy that is arriving."""

    def __init__(self, manifest: Payload, done: int) -> None:
        self.done = done
        self._listed, self.sidecar = unpack_manifest(manifest)
        self._payloads: list[Payload] = []

    def take(self, payload: Payload) -> None:
        """The next tensor."""
        _, _, shape = self._listed[len(self._payloads)]
        self._payloads.append(copy_of_received(payload, shape) if isinstance(payload, TensorPayload) else payload)

    def state(self, name: str, sidecar: dict[str, Value]) -> ExecutorState:
        """A state of the layers."""
        return ExecutorState(self._tensors(f"{name}/model/"), self._tensors(f"{name}/more/"), sidecar)

    def answered(self) -> Iterator[Answered]:
        """What workers were sent last."""
        for (group, step, micro, positions, last, counts), life, answer in self.sidecar["answered"]:
            turn = Turn(group, step, micro, tuple(positions), last, counts)
            yield Answered(turn, life, AnswerMeta.from_value(answer), [*self._under(f"answer/{group}/").values()])

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        return {name: each.tensor for name, each in self._under(prefix).items() if isinstance(each, TensorPayload)}

    def _under(self, prefix: str) -> Mapping[str, Payload]:
        named = zip(self._listed, self._payloads, strict=True)
        return {name.removeprefix(prefix): payload for (name, _, _), payload in named if name.startswith(prefix)}
