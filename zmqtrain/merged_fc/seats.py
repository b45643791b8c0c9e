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

LEFT, FINISHED, DROP = "left", "finished", "drop"
#: What `FcSeats.perform` carries out.
KINDS = (MEMBERS, CHANGE, LEFT, SITS_OUT, FINISHED, DROP)


class Turns(Protocol):
    """What an FC server does at a change. All under its lock, but for `do`."""

    async def do(self, kind: str, *arguments: Any) -> Value:
        """Have `FcSeats.perform` carry this out, under the lock, here and wherever there is a copy. Returns what it returns, once
        that may be told."""
        ...

    async def begins(self) -> None:
        """It is known who trains: return when they may begin. Not under the lock."""

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
        self.maybe_end()
        self._endpoint.serve(BEGIN, self._on_begin)
        self._endpoint.serve(MEMBERS, self._on_members)
        self._endpoint.serve(CHANGE, self._on_change)
        self._endpoint.serve(LEFT, self._on_left)
        self._endpoint.serve(SITS_OUT, self._on_sits_out)
        self._endpoint.serve(FINISHED, self._on_finished)

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
        if self._lives is not None and self.begun.is_set() and self._background is not None and not self._done.done():
            for peer, life in self._seen.gone(view, self._lives.training):
                self._background.run(self._drop(peer, life))

    def halt(self, reason: Mapping[str, Any]) -> None:
        """The run must stop. (The server would wait for others to come.)"""
        peer = str(reason.get("peer", "worker"))
        self._halted = PeerLostError(peer, str(reason.get("message", "the run was halted")), waiting_for="workers")
        if self._background is not None:
            self.maybe_end()

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
            lives = self._lives = Lives(self, self._groups, base, keeps_places=keeps_places)
            self._seen.add(lives.training)
        await self._turns.begins()
        self.begun.set()
        for peer, life in [] if self._view is None else self._seen.gone(self._view, lives.training):
            await self._drop(peer, life)
        return None

    async def _on_members(self, caller: PeerId, told: Value) -> Value:
        told_teams(told)
        await self._ready()
        return await self._turns.do(MEMBERS, told)

    async def _on_change(self, caller: PeerId, *told: Value) -> Value:
        told_change(told)
        await self._ready()
        return await self._turns.do(CHANGE, *told)

    async def _on_left(self, caller: PeerId, since: int) -> Value:
        await self._ready()
        return await self._turns.do(LEFT, caller, since)

    async def _on_sits_out(self, caller: PeerId, life: int, step: int) -> Value:
        (await self._ready()).group_of(caller)
        return await self._turns.do(SITS_OUT, caller, life, step)

    async def _on_finished(self, caller: PeerId, life: int) -> Value:
        await self._ready()
        return await self._turns.do(FINISHED, caller, life)

    async def _ready(self) -> Lives:
        await self.begun.wait()
        assert self._lives is not None
        if self._done.done():
            raise PeerLostError(self._endpoint.peer, "it has served all that there was to train", waiting_for="its members")
        return self._lives

    async def _drop(self, peer: PeerId, life: int) -> None:
        await self._turns.do(DROP, peer, life)

    # What changes, under the lock.

    async def perform(self, kind: str, *arguments: Any) -> Value:
        """Carry out what somebody has asked for, or what a view says."""
        lives = self._lives
        assert lives is not None
        match kind:
            case "members":
                teams = told_teams(arguments[0])
                present = {life for team in teams for life in team.members}
                for peer, _ in [life for life in lives.training.items() if life not in present]:
                    self._turns.forget_worker(peer)
                await lives.keep_only(teams)
                return lives.progress({team.unit for team in teams})
            case "change":
                await lives.change(told_change(arguments))
            case "left":
                await lives.rest(*arguments)
            case "sits_out":
                caller, life, step = arguments
                await self._apply(self._queue.sit_out(lives.group_of(caller), life, step))
            case "finished":
                lives.finish(*arguments)
            case "drop":
                peer, life = arguments
                if lives.training.get(peer) == life:
                    self._turns.forget_worker(peer)
                    await lives.drop(peer, life)
            case _:
                raise ProtocolError(f"{kind!r:.40} is nothing that changes who trains")
        return None

    # A copy on another server, if groups have one worker.

    def state(self) -> Value:
        """Who trains, as plain values for `load`."""
        assert self._lives is not None
        return self._lives.state()

    def load(self, state: Any) -> None:
        """Become what `state` has told of."""
        (base, _), *_ = state
        self._lives = Lives(self, self._groups, base)
        self._lives.load(state)
        self._seen.add(self._lives.training)

    def take_over(self) -> None:
        """From now on this server is the one that serves."""
        self.begun.set()
        if self._view is not None:
            self.heed(self._view)

    def finish_all(self) -> None:
        """All workers have left."""
        if self._lives is not None:
            self._lives.finish_all()
            self.maybe_end()

    @property
    def ended(self) -> bool:
        """Whether all workers have finished."""
        return self._lives is not None and self._lives.ended

    def maybe_end(self) -> None:
        """End if all workers that train have finished, and at least one has; or if none ever will."""
        if self._done.done() or (self._lives is not None and not self._lives.all_gone):
            return
        if self.ended and self.begun.is_set():
            self._done.set_result(None)
        elif self._halted is not None:
            self._done.set_exception(self._halted)
