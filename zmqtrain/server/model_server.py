"""A model server as a coroutine: the workers configure it, it serves its part of the model, and ends when all have finished::

    configure (worker 0) -> initial values -> serving (`Serving`) ... -> left -> finished (all workers)

During training, and when all workers have left, worker 0 may ask it to keep its part of a checkpoint, and to show its parameters to
group 0: those of one moment, between two updates.

If workers may be lost (`ServerSettings.elastic`), every worker may ask for that. The server goes on without the lost ones as soon
as a view of the members or another worker says so (`zmqtrain.exchange.server_changes`), and ends when all that train have finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.checkpoint_part import taking_back, unpack_manifest
from zmqtrain.exchange.norm_limit import NormLimit
from zmqtrain.exchange.server_changes import CHANGE, HISTORY, MEMBERS, plan_of
from zmqtrain.exchange.server_messages import Configuration, initial_tag, resumed_tag
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import Endpoint, PeerId, Subscription
from zmqtrain.server.background import Background
from zmqtrain.server.checkpoint import keep_pieces, restore_pieces
from zmqtrain.server.phantom_shard import PhantomEntry
from zmqtrain.server.serving import ServerTools, Serving, Shard
from zmqtrain.server.settings import ServerCheckpoints, ServerSettings
from zmqtrain.server.shard import TensorEntry
from zmqtrain.server.shard_entry import ShardEntry
from zmqtrain.waiting import in_time, task_group
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload


class ModelServer:
    """Serves one shard of the model until all workers have finished. `run` it once."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: ServerSettings,
        *,
        recorder: Recorder | None = None,
        checkpoints: ServerCheckpoints | None = None,
        arena: Arena | None = None,
    ) -> None:
        """``arena``: the memory that it shares with other processes of its host."""
        self._endpoint = endpoint
        self._arena = arena
        self._settings = settings
        self._recorder: Recorder = recorder or NullRecorder()
        self._checkpoints = checkpoints
        self._shard = Shard()
        self._left: set[PeerId] = set()
        self._finished: set[PeerId] = set()
        self._serving: Serving | None = None  # set once workers are sent the initial values
        self._began = asyncio.Event()  # it is serving
        self._lives: dict[PeerId, int] = {}  # elastic: the workers that train, and their incarnations
        self._base: Value = None  # elastic: what the run begins with
        self._changes: list[tuple[int, tuple[tuple[PeerId, int], ...]]] = []  # elastic: steps, and who trains from there on
        self._dropped: dict[PeerId, dict[int, int]] = {}  # elastic: lives that are lost, each with the step at which it began
        self._changing = asyncio.Lock()
        self._first = 0
        self._seen: set[tuple[PeerId, int]] = set()  # elastic: processes that a view has shown
        self._halted: PeerLostError | None = None

    @property
    def updates(self) -> int:
        """The number of updates of pieces so far."""
        return self._shard.updates

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness -> the number of gradients that had it."""
        return dict(self._shard.staleness)

    @property
    def entries(self) -> dict[int, ShardEntry]:
        """The pieces of this server, by index."""
        return self._shard.entries

    async def run(self) -> None:
        """Returns when all workers have finished. Raises `PeerLostError` if one is lost before that."""
        loop = asyncio.get_running_loop()
        self._configured: asyncio.Future[Configuration] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        arithmetic = Arithmetic("compute")
        self._endpoint.serve("configure", self._on_configure)
        self._endpoint.serve("checkpoint", self._on_checkpoint)
        self._endpoint.serve("show", self._on_show)
        self._endpoint.serve("left", self._on_left)
        self._endpoint.serve("finished", self._on_finished)
        if self._settings.elastic:
            self._endpoint.serve(MEMBERS, self._on_members)
            self._endpoint.serve(CHANGE, self._on_change)
            self._endpoint.serve(HISTORY, self._on_history)
        self._endpoint.on_lost(self._on_lost)
        pushes, orders = self._endpoint.subscribe("push"), self._endpoint.subscribe("order")
        try:
            async with task_group() as tasks:
                self._background = background = Background(tasks)
                tools = ServerTools(
                    self._endpoint, self._settings, self._recorder, self._checkpoints, arithmetic, background
                )  # fmt: skip
                life = tasks.create_task(self._live(tools, pushes, orders))
                await self._done
                life.cancel()
                background.end()
        finally:
            self._serving = None
            pushes.close()
            orders.close()
            arithmetic.close()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # raised above, unless another error came first
        self._shard.report(self._recorder)

    async def _live(self, tools: ServerTools, pushes: Subscription, orders: Subscription) -> None:
        configuration = await self._configured
        first_step = await self._fill(configuration)
        serving = Serving(tools, configuration, self._shard, first_step=first_step, finished=self._finished)
        if configuration.elastic is not None:
            plan = plan_of([configuration.elastic, []], {})
            self._base, self._lives, self._first = configuration.elastic, dict(plan.eras[0].members), plan.eras[0].since
            self._seen.update(self._lives.items())
            serving.begin_with({self._group_of(peer): life for peer, life in self._lives.items()})
        serving.begin()
        self._serving = serving
        self._began.set()
        await serving.let_go(self._left)
        await serving.run(pushes, orders)

    async def _fill(self, configuration: Configuration) -> int:
        """Create the shard and fill it. Returns the first step."""
        index = self._settings.index
        make: Callable[..., ShardEntry] = PhantomEntry
        if not configuration.phantom:
            make = partial(TensorEntry, arena=self._arena, horizon=configuration.horizon, rises=configuration.rises)
        for piece in configuration.pieces():
            if piece.server == index:
                bucket = configuration.buckets[piece.bucket]
                entry = make(piece, bucket.dtype, bucket.parameter_group, configuration.optimizer, starts=bucket.starts_in(piece))
                self._shard.entries[piece.index] = entry
        if configuration.limits and not configuration.phantom:
            self._shard.limit = NormLimit(self._shard.entries)
        if not self._shard.entries and self._checkpoints is not None:
            _, sidecar = keep_pieces({}, 0)
            self._background.run(self._checkpoints.hold_nothing(sidecar))  # workers wait only for other servers
            return 0
        if configuration.restored and self._checkpoints is not None:
            tensors, sidecar = await self._checkpoints.restore()
            return restore_pieces(self._shard.entries, tensors, sidecar, self._shard.limit)
        for entry in self._shard.entries.values():
            source = configuration.groups[0][configuration.buckets[entry.piece.bucket].first]
            if configuration.resumed is not None:
                async with in_time(source, f"piece {entry.piece.index} of the checkpoint", self._settings.barrier_s):
                    await self._resume(entry, source)
                continue
            wait = self._endpoint.receive(source, initial_tag(entry.piece.index), into=entry.memory())
            async with in_time(source, f"the initial parameters of piece {entry.piece.index}", self._settings.barrier_s):
                await wait
        return configuration.resumed or 0

    async def _resume(self, entry: ShardEntry, source: PeerId) -> None:
        """Begin a piece with what a worker has put together for it from a checkpoint."""
        tag, receive = resumed_tag(entry.piece.index), self._endpoint.receive
        listed, sidecar = unpack_manifest(await receive(source, tag))
        tensors: dict[str, Tensor] = {}
        for name, _, shape in listed:
            payload = await receive(source, tag)
            assert isinstance(payload, TensorPayload)
            tensors[name] = payload.tensor.clone().view(shape)  # the transport may own the memory
        with taking_back(f"piece {entry.piece.index}"):
            entry.load(tensors, int(sidecar["version"]))

    # Arriving messages.

    async def _on_configure(self, caller: PeerId, value: Value) -> Value:
        configuration = Configuration.from_value(value)
        if caller != configuration.groups[0][0]:
            raise ProtocolError(f"{caller} may not configure {self._endpoint.peer}; only {configuration.groups[0][0]} may")
        if self._configured.done():
            raise ProtocolError(f"{self._endpoint.peer} is already configured")
        self._configured.set_result(configuration)
        return None

    async def _on_finished(self, caller: PeerId, life: int | None = None) -> Value:
        if self._elastic:
            if self._lives.get(caller) == life:
                self._finished.add(caller)
            self._maybe_end()
            return None
        if caller not in self._settings.workers or caller in self._finished:
            return None
        self._finished.add(caller)
        if len(self._finished) == len(self._settings.workers):
            if not self._done.done():
                self._done.set_result(None)
            return None
        self._leave(caller)
        return None

    async def _on_left(self, caller: PeerId, since: int = 0) -> Value:
        if self._elastic:
            if self._serving is not None and since == self._since:  # otherwise it has more to train by now
                await self._serving.rest(self._group_of(caller))
            return None
        if caller in self._settings.workers:
            self._leave(caller)
        return None

    def _leave(self, worker: PeerId) -> None:
        if worker not in self._left:
            self._left.add(worker)
            if self._serving is not None and not self._done.done():
                # Not awaited: the answer must be sent before the last worker's request ends this server.
                self._background.run(self._serving.let_go(self._left))

    async def _on_checkpoint(self, caller: PeerId, step: int, show: bool = False, ordered: bool = False) -> Value:
        if caller not in self._settings.workers or self._serving is None or self._checkpoints is None:
            raise ProtocolError(f"{self._endpoint.peer} has no state to keep for {caller} at this point")
        await self._serving.keep(step, show=show, ordered=ordered, to=self._reader(caller))
        return None

    async def _on_show(self, caller: PeerId, label: str) -> Value:
        if caller not in self._settings.workers or self._serving is None:
            raise ProtocolError(f"{self._endpoint.peer} has no parameters to show to {caller} at this point")
        await self._serving.show(label, self._reader(caller))
        return None

    def _reader(self, caller: PeerId) -> int:
        """The group that reads what ``caller`` has asked for."""
        return self._group_of(caller) if self._elastic else 0

    # If workers may be lost.

    def heed(self, view: View) -> None:
        """There is a new view of the members."""
        for peer in self._settings.workers:
            member, life = view.members.get(peer), self._lives.get(peer)
            if member is not None:
                self._seen.add((peer, member.incarnation))
            gone = peer in view.lost if member is None else member.incarnation != life
            # A process that no view has shown yet is one that has come since.
            if gone and life is not None and (peer, life) in self._seen and not self._done.done():
                self._background.run(self._drop(peer, life))

    def halt(self, reason: Mapping[str, Any]) -> None:
        """The run must stop. (A server whose workers may be lost would wait for others to come.)"""
        peer = str(reason.get("peer", "worker"))
        self._halted = PeerLostError(peer, str(reason.get("message", "the run was halted")), waiting_for="workers")
        self._maybe_end()

    async def _drop(self, peer: PeerId, life: int) -> None:
        async with self._changing:
            if self._serving is not None and self._lives.get(peer) == life:
                await self._drop_now(peer, life)

    async def _drop_now(self, peer: PeerId, life: int) -> None:
        assert self._serving is not None
        del self._lives[peer]
        self._dropped.setdefault(peer, {})[life] = self._since
        await self._serving.drop(self._group_of(peer))
        self._maybe_end()

    async def _on_members(self, caller: PeerId, told: Value) -> Value:
        lives = _lives(told)
        await self._began.wait()
        async with self._changing:
            assert self._serving is not None
            for peer, life in list(self._lives.items()):
                if lives.get(peer) != life:
                    await self._drop_now(peer, life)
            lost = [(peer, life) for peer, dropped in self._dropped.items() for life in dropped]
            found = [(peer, life, await self._serving.progress(life)) for peer, life in lost]
            rows = [(peer, life, *progress) for peer, life, progress in found if progress is not None]
            told_back: list[Value] = [[*row] for row in rows]
            return [max([self._since, *(most for *_, most in rows)]), told_back]

    async def _on_change(self, caller: PeerId, since: int, told: Value) -> Value:
        lives = _lives(told)
        await self._began.wait()
        async with self._changing:
            assert self._serving is not None
            change = (since, tuple(lives.items()))
            if change in self._changes or since < self._since:
                return None
            self._changes.append(change)
            self._lives = {peer: life for peer, life in lives.items() if life not in self._dropped.get(peer, ())}
            self._finished -= self._lives.keys()
            await self._serving.enter(since, {self._group_of(peer): life for peer, life in self._lives.items()})
        return None

    async def _on_history(self, caller: PeerId) -> Value:
        changes: list[Value] = [[since, [[peer, life] for peer, life in lives]] for since, lives in self._changes]
        return [self._base, changes]

    @property
    def _elastic(self) -> bool:
        """Whether training goes on without workers that are lost: they must ask for it, too (a script's do not)."""
        return self._base is not None

    @property
    def _since(self) -> int:
        """The first step of those that train now."""
        return self._changes[-1][0] if self._changes else self._first

    def _group_of(self, peer: PeerId) -> int:
        assert self._settings.elastic, "groups have several workers"
        return self._settings.workers.index(peer)

    def _maybe_end(self) -> None:
        """End, if all that train have finished, and somebody has."""
        if self._done.done() or not self._finished >= self._lives.keys():
            return
        if self._finished:
            self._done.set_result(None)
        elif self._halted is not None:
            self._done.set_exception(self._halted)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if self._elastic and self._serving is not None:
            return
        if peer in self._settings.workers and peer not in self._finished and not self._done.done():
            self._done.set_exception(PeerLostError(peer, reason, waiting_for="its gradients"))


def _lives(told: Value) -> dict[PeerId, int]:
    """The processes that a worker's request names. Raises `ProtocolError`."""
    match told:
        case [*rows]:
            found = {str(row[0]): row[1] for row in rows if isinstance(row, list) and len(row) == 2 and isinstance(row[1], int)}
            if len(found) == len(rows):
                return {peer: life for peer, life in found.items() if isinstance(life, int)}
    raise ProtocolError(f"the members of a step are {told!r:.60}; each must be a name and an incarnation")
