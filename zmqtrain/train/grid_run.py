"""A worker of a run on a grid of several rows, of which others may be lost and may come.

Such a run is a sequence of *eras*. In each the same workers train on the same grid, as if nothing could happen to them. When one of
them is lost, the others break off the step that they are in (it counts on all of them or on none, `zmqtrain.exchange.grid_era`),
form the next grid (`zmqtrain.train.grid_plan`), and begin on it as a run does that resumes a checkpoint on another grid. Only that
this checkpoint is of the newest step that counts, and that survivors have it in their hands: one of each row, who gather it::

    train ──a worker is lost──▶ break off ─┐
      ▲   └─a larger grid is possible: up to a step that all know ─┐
      │                                    ▼                       ▼
      └──all have begun── build ◀── hand over ◀── agree: who is there, the newest step that counts
    spare ──────────────(the same, without a part of the model)────┘

The era before stays in memory until all have begun with the next one. So whoever is lost meanwhile, the survivors try again, as
long as one of each row is there. All agreements are about a view of the members, and a newer one ends them (`Membership.agree`).
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from zmqtrain.errors import ConnectivityError, PeerLostError, PeerTimeoutError, TooLateError, ZmqTrainError
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.checkpoint_part import Mark
from zmqtrain.exchange.elastic import RANKS_AT_ONCE
from zmqtrain.exchange.grid_era import EraEnds, EraMembers, FetchPart, GridEra, StepCommit, StepGate
from zmqtrain.exchange.make import make_exchange
from zmqtrain.membership.common_stop import ASK, TELL, StopPoint
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.scoped import ScopedEndpoint
from zmqtrain.topology.compute import rows_and_columns
from zmqtrain.train.checkpoint.handed_over import HandedOver, from_another
from zmqtrain.train.grid_plan import Era, Shapes, Standing, next_era
from zmqtrain.train.loop import TrainLoop
from zmqtrain.train.torch_work import TorchWork
from zmqtrain.waiting import abandoned
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from zmqtrain.train.task import Task

#: What a worker says when its part of an era has ended: that the run has, or that another era follows.
_END, _NEXT = 0, 1
#: All agree on single numbers of at most 64 bits, in which there is room for several smaller ones.
_SIDE, _MOST_STEPS = 1 << 14, 1 << 60


class _NoMoreEras(Exception):
    """Those that are there have agreed on what they need to know, and it follows that they cannot go on."""

    def __init__(self, error: PeerLostError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Life:
    """This worker in one era."""

    era: Era
    endpoint: ScopedEndpoint
    work: TorchWork
    exchange: Exchange
    loop: TrainLoop
    commit: StepCommit
    gate: StepGate
    task: asyncio.Task[None]
    ready: asyncio.Future[int]
    """Has the first step, once the worker could begin with it."""
    go: asyncio.Future[None]
    """All others can, too."""


class GridRun:
    """One worker. `run` it once, then `close` it."""

    def __init__(self, context: RoleContext, task: Task | None = None) -> None:
        self._context, self._task = context, task
        self._membership, self._timeouts = context.membership, context.timeouts
        self._all = tuple(worker.peer for worker in context.placement.workers)
        compute = context.topology.compute
        self._shapes = Shapes(compute.rows, compute.columns, tuple(map(rows_and_columns, compute.smaller_grids)))
        self._life: _Life | None = None
        self._next: _Life | None = None  # while it is being made
        self._era: Era | None = None  # the newest that has begun, as far as this worker was there
        self._standing: Standing | None = None
        self._changes = -1  # of the view that it is about
        self._changing = False  # whether this worker forms the next era
        self._attempt = 0  # the number of the newest one to form an era, of all in the run
        self._viewed = asyncio.Event()
        self._draining: set[asyncio.Task[None]] = set()
        self._spare_stop = StopPoint(context.endpoint, timeout_s=context.timeouts.barrier_s)
        self._placed = asyncio.Event()  # this worker trains, or is a spare
        self._took_part = False
        context.membership.on_view(lambda _: self._viewed.set())

    @property
    def took_part(self) -> bool:
        """Whether this worker has trained, or was a spare."""
        return self._took_part or self._placed.is_set()

    @property
    def loop(self) -> TrainLoop | None:
        """The training of this worker in the newest era that has begun; ``None`` if it is a spare."""
        return None if self._life is None else self._life.loop

    async def run(self) -> None:
        """Train to the end. Raises `TooLateError` if there is nothing left to train, and the errors of a run."""
        context, membership = self._context, self._membership
        context.endpoint.serve(ASK, self._on_ask)
        context.endpoint.serve(TELL, self._on_tell)
        if membership.late:
            await membership.ready()
        try:
            while not await (self._stand_by() if self._life is None else self._train(self._life)):
                self._took_part = self.took_part
                self._placed.clear()
                self._changing = True
                await self._change()
                self._changing = False
        finally:
            if self._life is not None and not self._life.task.done():
                self._life.task.cancel()
                await asyncio.wait({self._life.task})

    async def close(self) -> None:
        """Leave nothing running."""
        for life in (self._next, self._life):
            if life is not None:
                await self._close(life)
        self._next = self._life = None
        await abandoned(self._draining)

    # An era.

    async def _train(self, life: _Life) -> bool:
        """Take part in the era to its end. Returns whether that is the end of training; if not, another era follows."""
        life.go.set_result(None)
        self._placed.set()
        late = False
        while True:
            async with self._view(lambda view: view.changes != self._changes) as changed:
                await asyncio.wait({life.task, changed}, return_when=asyncio.FIRST_COMPLETED)
            view = self._membership.view
            lost = life.era.lost(self._living(view))
            if life.task.done() and (error := self._error_of(life)) is not None and not lost:
                if not isinstance(error, ConnectivityError):
                    raise error
                await self._wait_for_newer(view, error)  # which says who is lost
                continue
            if lost:
                await self._break_off(life, PeerLostError(lost[0], "it was lost", waiting_for="a step of the grid"))
                return False
            if view.changes != self._changes:
                life.gate.close()
                if await self._agree_on(view):
                    assert self._standing is not None
                    grows = self._standing.grows(len(self._living(view)), self._shapes)
                    life.gate.stop = self._standing.begun + 1 if grows else None
                    life.gate.open()
                continue
            if self._membership.halted.is_set():
                return True
            following = isinstance(life.task.exception(), EraEnds)
            try:
                what = await self._next_of_all(view, _NEXT if following else _END)
            except PeerTimeoutError:
                if late:
                    raise
                late = True  # spares may have waited since long before
                continue
            if what is not None:
                return what == _END

    async def _stand_by(self) -> bool:
        """Be a spare until the end of training, or until another era follows. Returns whether it is the end."""
        while True:
            view = self._membership.view
            if view.changes != self._changes and not await self._agree_on(view):
                continue
            assert self._standing is not None
            if self._standing.over:
                return False
            self._placed.set()
            with suppress(PeerTimeoutError):  # the others train on, for days
                what = await self._next_of_all(view, _END)
                if what is not None:
                    return what == _END

    async def _next_of_all(self, view: View, what: int) -> int | None:
        """Wait until all have come to the end of the era. Returns what follows; ``None``: there is a newer view."""
        try:
            return await self._agree(view, "next", what)
        except PeerTimeoutError:
            raise
        except ConnectivityError as error:
            await self._wait_for_newer(view, error)
            return None

    def _error_of(self, life: _Life) -> BaseException | None:
        if life.task.cancelled():
            return ConnectivityError("its training was cancelled")
        error = life.task.exception()
        return None if isinstance(error, EraEnds) else error

    async def _break_off(self, life: _Life, error: PeerLostError) -> None:
        """Stop in the middle of a step."""
        life.loop.work.replica.abort(error)
        await self._stop(life)
        if (failed := self._error_of(life)) is not None and not isinstance(failed, ConnectivityError):
            raise failed

    async def _stop(self, life: _Life) -> None:
        """It trains no more, but its replica stays."""
        if not life.task.done():
            life.task.cancel()
            await asyncio.wait({life.task})
        with suppress(ZmqTrainError, TimeoutError, ExceptionGroup):
            async with asyncio.timeout(self._timeouts.grace_s):
                await life.exchange.stop(failed=True)
        life.endpoint.end()

    async def _close(self, life: _Life) -> None:
        life.loop.work.replica.abort(ConnectivityError("this worker has left the grid"))
        await self._stop(life)
        if not life.task.cancelled():
            life.task.exception()  # raised already, or a consequence of what was
        await life.work.close(self._timeouts.grace_s)
        drain = asyncio.get_running_loop().create_task(
            life.endpoint.drain(), name="throw away what arrives for an era that is over"
        )
        self._draining.add(drain)

    # From one era to the next.

    async def _change(self) -> None:
        """Take part in forming the next era until it has begun: then this worker has a life in it, or is a spare."""
        while True:
            view = self._membership.view
            if view.changes != self._changes and not await self._agree_on(view):
                continue
            assert self._standing is not None
            try:
                if await self._try(view, self._standing):
                    return
            except _NoMoreEras as end:
                raise end.error from None
            except ConnectivityError as error:
                if isinstance(error, PeerLostError) and error.peer == COORDINATOR:  # while it handed out what a run resumes
                    raise
                await self._wait_for_newer(view, error)
            finally:
                if self._next is not None:
                    failed, self._next = self._next, None
                    await self._close(failed)

    async def _try(self, view: View, standing: Standing) -> bool:
        """Form the next era of those in ``view``. Returns whether it has begun; not if there is a newer view."""
        living = self._living(view)
        life = self._life
        newest = await self._agree(view, "newest", -1 if life is None else life.commit.counted)
        # Not the view's version: some may have a newer one, of which only those hear who ask.
        self._attempt = await self._agree(view, "attempt", self._attempt + 1)
        if standing.number < 0 and not await self._agree(view, "first", not self._membership.late):
            await self._come_too_late(view)
        if standing.gone:
            rows = " and ".join(str(row) for row in standing.gone)
            await self._give_up(f"no worker is left that has the part of the model of row {rows} of the grid")
        era = next_era(standing, living, self._shapes)
        if era is None:
            await self._give_up(f"{len(living)} workers are left, fewer than any of the job's grids needs")
        if life is not None:
            await life.work.rest_at(newest)
            life.loop.counts_up_to(newest)
        scope = f"era/{era.number}/{self._attempt}"
        async with self._in_scope(scope, newest + 1, standing.givers) as (endpoint, fetch, handed):
            if self._context.role.peer in era.peers:
                # Others who have come meanwhile wait until it has begun.
                async with self._view(lambda newer: any(self._living(newer).get(p) != i for p, i in living.items())) as lost:
                    making = asyncio.create_task(
                        self._make(era, endpoint, fetch, handed, newest + 1, standing.givers), name="form the next grid"
                    )
                    made = False
                    try:
                        await asyncio.wait({making, lost}, return_when=asyncio.FIRST_COMPLETED)
                        made = making.done()
                    finally:  # this worker may be ended meanwhile, too
                        if not made:
                            if self._next is not None:
                                self._next.loop.work.replica.abort(ConnectivityError("another worker was lost"))
                            await abandoned({making})
                    if not made:
                        return False
                    await making
            # Whoever was lost may have come back already: that one begins nothing here.
            await self._membership.agree(f"grid/begun/{self._attempt}", 0, tuple(living), processes=living)
        before, self._era = self._era, era
        self._standing = Standing(era.number, era.columns, tuple(era.holders(row, self._all) for row in range(era.rows)))
        self._life, self._next = self._next, None
        if self._life is not None:
            self._record(view, era, before, self._life.ready.result())
        if life is not None:
            await self._close(life)
        return True

    async def _make(
        self, era: Era, endpoint: ScopedEndpoint, fetch: FetchPart | None, handed: HandedOver, step: int, givers: tuple[PeerId, ...]
    ) -> None:
        """Hand over what this worker has, and get ready for the era's first step."""
        life = self._life
        if life is not None and endpoint.peer in givers:
            into = handed if endpoint.peer == givers[0] else None
            await life.work.hand_over(endpoint, life.exchange, into, step, givers)
            handed.open()
        commit, gate = StepCommit(), StepGate()
        context = self._context_of(era, endpoint, GridEra(self._mark_of(era), commit, fetch))
        members = EraMembers(endpoint, era.peers, gate, timeout_s=self._timeouts.barrier_s)
        work = await TorchWork.make(context, members, self._task)
        self._task, commit.prepare = work.task, work.prepare_update
        running = asyncio.get_running_loop()
        ready: asyncio.Future[int] = running.create_future()
        go: asyncio.Future[None] = running.create_future()

        async def begun(first: int) -> None:
            commit.begin(first)
            gate.begun = first - 1
            ready.set_result(first)
            await go

        try:
            exchange = make_exchange(context, members, whole_updates=work.whole_updates)
            loop = TrainLoop(context, work, exchange, members, begun=begun)
        except BaseException:
            await work.close(self._timeouts.grace_s)
            raise
        loop.stop_point.go_on_from(self._spare_stop if life is None else life.loop.stop_point)
        task = running.create_task(loop.run(), name=f"training of {endpoint.peer} on grid {era.number}")
        self._next = _Life(era, endpoint, work, exchange, loop, commit, gate, task, ready, go)
        first_of: list[asyncio.Future[Any]] = [task, ready]
        await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await task  # raises why
            raise AssertionError("training ended before it began")

    @asynccontextmanager
    async def _in_scope(
        self, scope: str, step: int, givers: tuple[PeerId, ...]
    ) -> AsyncIterator[tuple[ScopedEndpoint, FetchPart | None, HandedOver]]:
        """The endpoint of an era, from which the state can be fetched within the block, and what this worker hands over of it."""
        endpoint = ScopedEndpoint(self._context.endpoint, scope, beyond=(COORDINATOR,))
        handed = HandedOver(endpoint, step)
        serving = asyncio.create_task(handed.serve(), name="hand over the state")
        try:
            if not givers:
                yield endpoint, None, handed
            elif givers[0] == endpoint.peer:
                yield endpoint, handed.fetch, handed
            else:
                yield endpoint, from_another(endpoint, givers[0], self._timeouts.barrier_s), handed
        finally:
            await abandoned({serving})
            if self._next is None or self._next.endpoint is not endpoint:
                endpoint.end()

    def _mark_of(self, era: Era) -> Mark:
        return (era.number, len(era.workers)) if era.number or len(era.workers) < len(self._all) else ()

    def _context_of(self, era: Era, endpoint: ScopedEndpoint, of: GridEra) -> RoleContext:
        """What a worker of the era is given: a run of these workers on this grid, in which none may be lost."""
        context = self._context
        topology, placement = context.topology, context.placement
        job = topology.job.model_copy(update={"elastic": False, "restarts": 0, "min_workers": None})
        compute = topology.compute.model_copy(update={"group_size": len(era.workers), "grid": f"{era.rows}x{era.columns}"})
        parallel = topology.parallel
        statistics = parallel.statistics or "whole"  # as on grids of several rows, also if this one has one
        parallel = parallel.model_copy(update={"verify": parallel.verify and not era.number, "statistics": statistics})
        roles = tuple(replace(placement.role(peer), index=rank, group=0, position=rank) for rank, peer in enumerate(era.peers))
        placement = replace(placement, roles=roles, group_size=len(roles))
        return replace(
            context,
            endpoint=endpoint,
            membership=context.membership.among(f"{era.number}/", era.peers),
            role=placement.role(endpoint.peer),
            placement=placement,
            topology=topology.model_copy(update={"job": job, "compute": compute, "parallel": parallel}),
            arena=None,
            make_member=None,
            era=of,
        )

    async def _give_up(self, reason: str) -> NoReturn:
        lost = self._membership.view.lost
        await self._membership.need_all(reason)
        who, why = ", ".join(lost) or "other workers", "; ".join([reason, *lost.values()])
        raise _NoMoreEras(PeerLostError(who, why, waiting_for="the next grid"))

    async def _come_too_late(self, view: View) -> NoReturn:
        """Nobody is there who has been there from the beginning."""
        if any(peer not in view.members and peer not in view.lost for peer in self._all):
            raise _NoMoreEras(TooLateError(self._context.role.peer, "the others have trained all there was"))
        await self._give_up("no worker is left that has anything of the model")

    def _record(self, view: View, era: Era, before: Era | None, first: int) -> None:
        self._context.recorder.audit("grid", number=era.number, rows=era.rows, workers=era.peers)
        if not era.number:
            return
        gone = [] if before is None else before.lost(self._living(view))
        reason = f"lost {', '.join(gone)}" if gone else "others have joined"
        self._context.recorder.event(
            "view",
            step=first,
            version=view.version,
            members=list(era.peers),
            reason=f"{reason}; the grid is {era.rows}x{era.columns}",
        )

    # What all agree on.

    async def _agree_on(self, view: View) -> bool:
        """Find out with all others in this view how things stand. Returns whether it is known; not if there is a newer view."""
        living, era = self._living(view), self._era
        begun = -1 if self._life is None else self._life.gate.begun
        try:
            mine = 0 if era is None else ((era.number + 1) * _SIDE + era.rows) * _SIDE + era.columns
            rest, columns = divmod(await self._agree(view, "era", mine), _SIDE)
            number, rows = rest // _SIDE - 1, rest % _SIDE
            own = era if era is not None and era.number == number else None
            holders = [await self._holders(view, own, row) for row in range(rows)]
            progress = await self._agree(view, "progress", self._changing * _MOST_STEPS + begun + 1)
        except ConnectivityError as error:
            await self._wait_for_newer(view, error)
            return False
        there = tuple(tuple(peer for peer in row if peer in living) for row in holders)
        self._standing = Standing(number, columns, there, begun=progress % _MOST_STEPS - 1, ended=progress >= _MOST_STEPS)
        self._changes = view.changes
        return True

    async def _holders(self, view: View, era: Era | None, row: int) -> list[PeerId]:
        """Those in the view that have a row's part of the model, by rank."""
        living = self._living(view)
        mine = set() if era is None else {peer for peer, process in era.row(row) if living.get(peer) == process}
        found: list[PeerId] = []
        for start in range(0, len(self._all), RANKS_AT_ONCE):
            ranks = self._all[start : start + RANKS_AT_ONCE]
            mask = await self._agree(view, f"row/{row}/{start}", sum(1 << n for n, peer in enumerate(ranks) if peer in mine))
            found += [peer for n, peer in enumerate(ranks) if mask >> n & 1]
        return found

    async def _agree(self, view: View, name: str, value: int) -> int:
        return await self._membership.agree(f"grid/{name}", value, tuple(self._living(view)), version=view.version)

    def _living(self, view: View) -> dict[PeerId, int]:
        """The workers that can take part, by rank, with their incarnations."""
        members = view.members
        return {peer: members[peer].incarnation for peer in self._all if peer in members and members[peer].ready}

    async def _wait_for_newer(self, view: View, error: BaseException) -> None:
        """Wait for a view that explains the error. Raises it if none comes."""
        while True:
            was_away = self._membership.away
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.lost_s + self._timeouts.request_s):
                    while self._membership.view.version <= view.version:
                        self._viewed.clear()
                        await self._viewed.wait()
                    return
            if not was_away and not self._membership.away:  # a coordinator that is away tells nobody who was lost
                raise error

    @asynccontextmanager
    async def _view(self, expected: Callable[[View], bool]) -> AsyncIterator[asyncio.Task[None]]:
        """A task that ends once there is a view such as is ``expected``."""

        async def wait() -> None:
            while not expected(self._membership.view):
                self._viewed.clear()
                await self._viewed.wait()

        task = asyncio.create_task(wait(), name="wait for others to be lost, or to come")
        try:
            yield task
        finally:
            await abandoned({task})

    # Common steps of all workers, for the coordinator.

    async def _on_ask(self, caller: PeerId, *args: Value) -> Payload | Value:
        return await self._stop_requested(ASK, caller, args)

    async def _on_tell(self, caller: PeerId, *args: Value) -> Payload | Value:
        return await self._stop_requested(TELL, caller, args)

    async def _stop_requested(self, method: str, caller: PeerId, args: tuple[Value, ...]) -> Payload | Value:
        while True:
            await self._placed.wait()
            life = self._life
            if life is None:
                return await self._spare_stop.serve(method, caller, *args)
            with suppress(ConnectivityError):  # that era has ended meanwhile
                handler = await life.endpoint.handler(method)
                return await handler(caller, *args)
