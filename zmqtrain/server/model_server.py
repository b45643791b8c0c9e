"""A model server as a coroutine: the workers configure it, it serves its part of the model, and ends when all have finished::

    configure (worker 0) -> initial values -> serving (`Serving`) ... -> left -> finished (all workers)

During training, and when all workers have left, worker 0 may ask it to keep its part of a checkpoint, and to show its parameters to
group 0: those of one moment, between two updates.

If workers may be lost (`ServerSettings.elastic`), every worker may ask for that. The server goes on without the lost ones as soon
as a view of the members or another worker says so (`zmqtrain.exchange.server_changes`), and ends when all that train have finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.server_changes import CHANGE, HISTORY, MEMBERS
from zmqtrain.exchange.server_messages import Configuration
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import Endpoint, PeerId, Subscription
from zmqtrain.server.aggregator import Keep
from zmqtrain.server.background import ServerTasks
from zmqtrain.server.fill import fill, make_entries
from zmqtrain.server.lives import Lives, Seen, told_change, told_teams
from zmqtrain.server.serving import ServerTools, Serving, Shard, report
from zmqtrain.server.settings import ServerCheckpoints, ServerSettings
from zmqtrain.server.shard_entry import ShardEntry
from zmqtrain.waiting import task_group
from zmqtrain.wire.payload import Value


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
        self._lives: Lives | None = None
        """If workers may be lost, once it is serving: they must ask for it, too (a script's do not)."""
        self._seen = Seen(settings.workers)
        self._view: View | None = None
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
                self._background = background = ServerTasks(tasks)
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
        self._shard.state_held(self._recorder)
        report({self._settings.index: self._shard}, self._recorder)

    async def _live(self, tools: ServerTools, pushes: Subscription, orders: Subscription) -> None:
        configuration = await self._configured
        make_entries(self._shard, configuration, self._settings.index, self._arena)
        first_step = await fill(self._shard, configuration, tools)
        serving = Serving(tools, configuration, self._shard, first_step=first_step, finished=self._finished)
        if configuration.elastic is not None:
            self._lives = Lives(serving, configuration.groups, configuration.elastic, keeps_places=configuration.keeps_places)
            self._seen.add(self._lives.training)
            for peer, life in [] if self._view is None else self._seen.gone(self._view, self._lives.training):
                async with serving.lock:  # lost while this server got its values
                    await self._lives.drop(peer, life)
        serving.begin(() if self._lives is None else self._lives.training)
        self._serving = serving
        self._began.set()
        await serving.let_go(self._left)
        await serving.run(pushes, orders)

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
        if self._lives is not None:
            self._lives.finish(caller, life)
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
        if self._lives is not None:
            if self._serving is not None:
                async with self._serving.lock:
                    await self._lives.rest(caller, since)
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
        lives = self._lives
        if lives is not None and not self._configured.result().whole_groups:
            keep = Keep(step, show, caller)
        else:
            keep = Keep(step, show, None, 0 if lives is None else lives.group_of(caller))
        await self._serving.keep(keep, ordered=ordered)
        return None

    async def _on_show(self, caller: PeerId, label: str, together: bool = False) -> Value:
        """``together``: to all of the caller's group, each its own part."""
        if caller not in self._settings.workers or self._serving is None:
            raise ProtocolError(f"{self._endpoint.peer} has no parameters to show to {caller} at this point")
        if self._lives is None:
            await self._serving.show(label, None, 0)
        else:
            await self._serving.show(label, None if together else caller, self._lives.group_of(caller))
        return None

    # If workers may be lost.

    def heed(self, view: View) -> None:
        """There is a new view of the members."""
        self._view = view
        self._seen.note(view)
        if self._lives is not None and not self._done.done():
            for peer, life in self._seen.gone(view, self._lives.training):
                self._background.run(self._drop(self._lives, peer, life))

    def finish_all(self) -> None:
        """All workers have left."""
        if self._lives is not None:
            self._lives.finish_all()
            self._maybe_end()

    def halt(self, reason: Mapping[str, Any]) -> None:
        """The run must stop. (A server whose workers may be lost would wait for others to come.)"""
        peer = str(reason.get("peer", "worker"))
        self._halted = PeerLostError(peer, str(reason.get("message", "the run was halted")), waiting_for="workers")
        self._maybe_end()

    async def _drop(self, lives: Lives, peer: PeerId, life: int) -> None:
        if self._serving is not None:
            async with self._serving.lock:
                await lives.drop(peer, life)
            self._maybe_end()

    async def _on_members(self, caller: PeerId, told: Value) -> Value:
        teams, (serving, lives) = told_teams(told), await self._begun()
        async with serving.lock:
            self._require_more()
            await lives.keep_only(teams)
            self._maybe_end()
            return lives.progress({team.unit for team in teams})

    async def _on_change(self, caller: PeerId, *told: Value) -> Value:
        change, (serving, lives) = told_change(told), await self._begun()
        async with serving.lock:
            self._require_more()
            await lives.change(change)
        return None

    async def _on_history(self, caller: PeerId) -> Value:
        return (await self._begun())[1].history()

    async def _begun(self) -> tuple[Serving, Lives]:
        await self._began.wait()
        self._require_more()
        assert self._serving is not None
        assert self._lives is not None, "workers that may not be lost never ask for changes"
        return self._serving, self._lives

    def _require_more(self) -> None:
        """A worker that comes when all others have finished comes too late. (It may have waited for the lock meanwhile.)"""
        if self._serving is None or self._done.done():
            raise PeerLostError(self._endpoint.peer, "it has served all that there was to train", waiting_for="its members")

    def _maybe_end(self) -> None:
        """End if all workers that train have finished, and at least one has."""
        if self._done.done() or self._lives is None or not self._lives.all_gone:
            return
        if self._lives.ended:
            self._done.set_result(None)
        elif self._halted is not None:
            self._done.set_exception(self._halted)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if self._lives is not None or (self._settings.elastic and peer not in self._givers()):
            return
        if peer in self._settings.workers and peer not in self._finished and not self._done.done():
            self._done.set_exception(PeerLostError(peer, reason, waiting_for="its gradients"))

    def _givers(self) -> Sequence[PeerId]:
        """The workers that configure this server and give it its first values."""
        return self._configured.result().groups[0] if self._configured.done() else self._settings.workers[:1]
