"""Who trains, at an FC server whose workers may be lost.

Workers tell it what they tell model servers (`zmqtrain.exchange.server_changes`), and `zmqtrain.server.lives` decides what follows,
as for a shard: the merged layers are one more piece of the model. What a lost worker has had computed for its step counts; all else
that has come from it is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.exchange.server_changes import BEGIN, CHANGE, MEMBERS, SITS_OUT
from zmqtrain.membership.view import View
from zmqtrain.merged_fc.messages import EVALUATE, parse_activations_tag
from zmqtrain.merged_fc.queue import Applied, FcQueue
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.server.background import ServerTasks
from zmqtrain.server.lives import Lives, Seen, told_change, told_teams
from zmqtrain.wire.payload import Value


class Turns(Protocol):
    """What an FC server does at a change. All under its lock."""

    async def apply(self, applied: Applied) -> None: ...

    def forget_group(self, group: int) -> None:
        """What has arrived for the group's next step is of no use."""

    def forget_worker(self, peer: PeerId) -> None:
        """The worker is lost."""


class FcSeats:
    """Implements `zmqtrain.server.lives.Seats` with a queue, and takes the workers' requests about it."""

    def __init__(
        self, endpoint: Endpoint, groups: Sequence[Sequence[PeerId]], queue: FcQueue, turns: Turns, lock: asyncio.Lock
    ) -> None:
        """``groups``: all workers that the run can have. ``lock``: held while a turn is computed."""
        self._endpoint, self._groups, self._queue, self._turns, self._lock = endpoint, groups, queue, turns, lock
        self._workers = tuple(peer for group in groups for peer in group)
        self._lives: Lives | None = None
        self._seen = Seen(self._workers)
        self._view: View | None = None
        self._halted: PeerLostError | None = None
        self._background: ServerTasks | None = None
        self.keeps_places = False
        """Whether others wait for a group that has lost a worker, until its others have trained its step again."""
        self.begun = asyncio.Event()
        """It is known who trains."""

    def serve(self, done: asyncio.Future[None]) -> None:
        """Take requests. ``done`` ends the server."""
        self._done = done
        self._maybe_end()
        self._endpoint.serve(BEGIN, self._on_begin)
        self._endpoint.serve(MEMBERS, self._on_members)
        self._endpoint.serve(CHANGE, self._on_change)
        self._endpoint.serve("left", self._on_left)
        self._endpoint.serve(SITS_OUT, self._on_sits_out)
        self._endpoint.serve("finished", self._on_finished)

    def heed_in(self, background: ServerTasks) -> None:
        """Where `heed` carries out what follows from views."""
        self._background = background

    def needs(self, peer: PeerId) -> bool:
        """Whether the server cannot begin without this worker."""
        return self._lives is None and peer == self._workers[0]

    def trains(self, sender: PeerId, tag: Tag, group: int) -> bool:
        """Whether activations with this tag are of a process, or a team, that is there. Raises `ProtocolError`."""
        (what, _), _, life = parse_activations_tag(tag)
        assert self._lives is not None
        if what == EVALUATE:
            return self._lives.training.get(sender) == life
        return life is not None and self._queue.life(group) == life

    def heed(self, view: View) -> None:
        """There is a new view of the members."""
        self._view = view
        self._seen.note(view)
        if self._lives is not None and self._background is not None and not self._done.done():
            for peer, life in self._seen.gone(view, self._lives.training):
                self._background.run(self._drop(self._lives, peer, life))

    def halt(self, reason: Mapping[str, Any]) -> None:
        """The run must stop. (The server would wait for others to come.)"""
        peer = str(reason.get("peer", "worker"))
        self._halted = PeerLostError(peer, str(reason.get("message", "the run was halted")), waiting_for="workers")
        if self._background is not None:
            self._maybe_end()

    # zmqtrain.server.lives.Seats

    @property
    def lives(self) -> dict[int, int]:
        return dict(self._queue.lives)

    @lives.setter
    def lives(self, lives: dict[int, int]) -> None:
        self._queue.begin(lives)

    @property
    def teams(self) -> dict[int, tuple[PeerId, ...]]:
        return {}

    @teams.setter
    def teams(self, teams: dict[int, tuple[PeerId, ...]]) -> None:
        self._queue.seat({group: tuple(map(self._groups[group].index, peers)) for group, peers in teams.items()})

    async def drop(self, group: int) -> None:
        self._turns.forget_group(group)
        await self._apply(self._queue.drop(group))

    def hold(self, group: int) -> None:
        self._turns.forget_group(group)
        self._queue.hold(group)

    async def follow(self, group: int, life: int, first: int) -> None:
        self._queue.follow(group, life, first)

    async def enter(self, step: int, lives: Mapping[int, int]) -> None:
        for group, life in self._queue.lives.items():
            if lives.get(group) != life:
                self._turns.forget_group(group)
        for applied in self._queue.enter(step, lives):
            await self._apply(applied)

    async def rest(self, group: int) -> None:
        await self._apply(self._queue.rest(group))

    def progress(self, life: int) -> tuple[int, int] | None:
        return self._queue.progress(life)

    async def _apply(self, applied: Applied | None) -> None:
        if applied is not None:
            await self._turns.apply(applied)

    # Requests.

    async def _on_begin(self, caller: PeerId, base: Value, keeps_places: bool) -> Value:
        if caller != self._workers[0] or self._lives is not None:
            raise ProtocolError(f"{caller} may not tell {self._endpoint.peer} who trains; only {self._workers[0]} may, once")
        self.keeps_places = keeps_places
        async with self._lock:
            self._lives = Lives(self, self._groups, base, keeps_places=keeps_places)
            self._seen.add(self._lives.training)
            for peer, life in [] if self._view is None else self._seen.gone(self._view, self._lives.training):
                await self._without(self._lives, peer, life)
        self.begun.set()
        return None

    async def _on_members(self, caller: PeerId, told: Value) -> Value:
        teams, lives = told_teams(told), await self._ready()
        present = {life for team in teams for life in team.members}
        async with self._lock:
            for life in [life for life in lives.training.items() if life not in present]:
                self._turns.forget_worker(life[0])
            await lives.keep_only(teams)
            self._maybe_end()
            return lives.progress({team.unit for team in teams})

    async def _on_change(self, caller: PeerId, *told: Value) -> Value:
        change, lives = told_change(told), await self._ready()
        async with self._lock:
            await lives.change(change)
        return None

    async def _on_left(self, caller: PeerId, since: int) -> Value:
        lives = await self._ready()
        async with self._lock:
            await lives.rest(caller, since)
        return None

    async def _on_sits_out(self, caller: PeerId, life: int, step: int) -> Value:
        lives = await self._ready()
        async with self._lock:
            await self._apply(self._queue.sit_out(lives.group_of(caller), life, step))
        return None

    async def _on_finished(self, caller: PeerId, life: int) -> Value:
        lives = await self._ready()
        lives.finish(caller, life)
        self._maybe_end()
        return None

    async def _ready(self) -> Lives:
        await self.begun.wait()
        assert self._lives is not None
        if self._done.done():
            raise PeerLostError(self._endpoint.peer, "it has served all that there was to train", waiting_for="its members")
        return self._lives

    async def _drop(self, lives: Lives, peer: PeerId, life: int) -> None:
        async with self._lock:
            await self._without(lives, peer, life)
        self._maybe_end()

    async def _without(self, lives: Lives, peer: PeerId, life: int) -> None:
        if lives.training.get(peer) == life:
            self._turns.forget_worker(peer)
            await lives.drop(peer, life)

    def _maybe_end(self) -> None:
        """End if all workers that train have finished, and at least one has; or if none ever will."""
        if self._done.done() or (self._lives is not None and not self._lives.all_gone):
            return
        if self._lives is not None and self._lives.ended:
            self._done.set_result(None)
        elif self._halted is not None:
            self._done.set_exception(self._halted)
