"""Deliberate faults in what the workers of a grid of several rows do when others are lost or come (`zmqtrain.train.grid_run`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

import zmqtrain.train.grid_run as grid_run
from benchmarks.patches import Patches
from zmqtrain.exchange.grid_era import StepCommit
from zmqtrain.membership.barrier import Barriers
from zmqtrain.membership.client import Membership
from zmqtrain.net.scoped import ScopedEndpoint
from zmqtrain.train.checkpoint.handed_over import HandedOver
from zmqtrain.train.grid_plan import Era, Shapes, Standing
from zmqtrain.train.grid_run import GridRun
from zmqtrain.train.replica import TorchReplica


def counted_by_some(patches: Patches) -> None:
    """A step counts for each worker that has its own sums, without a word from the others."""

    async def mutated(self: StepCommit, _group: Any, step: int) -> None:
        if self.prepare is not None:
            await self.prepare()
        self.summed = self.counted = step

    patches.around(StepCommit, "all_have", lambda _: mutated)


def begun_is_counted(patches: Patches) -> None:
    """Of a step that has begun anywhere, survivors say that it counts."""

    def make(try_: Any) -> Any:
        async def mutated(self: GridRun, *args: Any) -> bool:
            if self._life is not None:
                self._life.commit.counted = max(self._life.commit.counted, self._life.gate.begun)
            return bool(await try_(self, *args))

        return mutated

    patches.around(GridRun, "_try", make)


def sums_thrown_away(patches: Patches) -> None:
    """A worker that has the sums of a step that counts, but has not updated its parameters, leaves them as they are."""
    patches.around(TorchReplica, "rest_at", lambda rest: lambda self, step: rest(self, min(step, self.updated)))


def broken_forward_kept(patches: Patches) -> None:
    """What the forward of a step that was given up has done to buffers stays."""
    patches.around(TorchReplica, "rest_at", lambda rest: lambda self, _step: rest(self, self._step))


def _begin_later(patches: Patches, steps: int) -> None:
    """The state of each next era is taken for that of another step."""

    def make(scope: Any) -> Any:
        def mutated(self: GridRun, name: str, step: int, givers: tuple[str, ...]) -> Any:
            return scope(self, name, max(0, step + steps) if givers else step, givers)

        return mutated

    patches.around(GridRun, "_in_scope", make)


def batch_trained_twice(patches: Patches) -> None:
    """The next era begins with the step that counts."""
    _begin_later(patches, -1)


def batch_left_out(patches: Patches) -> None:
    """The next era leaves out the step that was given up."""
    _begin_later(patches, 1)


def from_the_wrong_row(patches: Patches) -> None:
    """The parts of the first two rows are put together in the wrong order."""

    def make(givers: Any) -> Any:
        def mutated(self: Standing) -> tuple[str, ...]:
            found: tuple[str, ...] = givers(self)
            return (*found[1::-1], *found[2:])

        return mutated

    patches.around(Standing, "givers", make)


def from_a_newcomer(patches: Patches) -> None:
    """Whoever has the name of a worker of a row is taken for one that has the row's part of the model."""

    async def mutated(self: GridRun, view: Any, _era: Era | None, row: int) -> list[str]:
        living = self._living(view)
        return [peer for peer in self._all[row :: self._shapes.rows] if peer in living]

    patches.around(GridRun, "_holders", lambda _: mutated)


def handed_over_without_momentum(patches: Patches) -> None:
    """What optimizers remember is not handed over."""

    def make(put: Any) -> Any:
        def mutated(self: HandedOver, name: str, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
            kept = {of: torch.zeros_like(tensors[of]) if of.startswith("optimizer/") else tensors[of] for of in tensors}
            put(self, name, kept, values)

        return mutated

    patches.around(HandedOver, "put", make)


def newcomer_without_momentum(patches: Patches) -> None:
    """One that comes to a grid begins with an optimizer of its own; the others of its row do not."""

    def make(life: Any) -> Any:
        async def mutated(self: GridRun, *args: Any) -> None:
            await life(self, *args)
            if self._life is None and self._next is not None and self._next.era.number:
                for state in self._next.work.replica.optimizer.state.values():
                    for value in state.values():
                        value.zero_()

        return mutated

    patches.around(GridRun, "_make", make)


def loss_ignored(patches: Patches) -> None:
    """An era goes on although one of its workers is lost."""
    patches.around(Era, "lost", lambda _: lambda _self, _living: ())


def stale_plan_believed(patches: Patches) -> None:
    """While it forms the next era, a worker believes what was agreed on about the view before."""

    def make(agree: Any) -> Any:
        async def mutated(self: GridRun, view: Any) -> bool:
            if self._standing is not None and self._changing and self._standing.over:
                self._changes = view.changes
                return True
            return bool(await agree(self, view))

        return mutated

    patches.around(GridRun, "_agree_on", make)


def plan_of_another_view(patches: Patches) -> None:
    """Workers form the next era of those in their own views, and do not ask whether these are the same."""

    async def mutated(self: GridRun, view: Any, name: str, value: int) -> int:
        return await self._membership.agree(f"grid/{name}", value, tuple(self._living(view)))

    patches.around(GridRun, "_agree", lambda _: mutated)
    patches.around(Barriers, "outdate", lambda _: lambda _self, _version, _reason: [])


def _places(patches: Patches, other: Callable[[Era, Mapping[str, int], str], Era]) -> None:
    """Each worker has its own idea, ``other(era, living, worker)``, of who has which place on the next grid."""
    me = ContextVar[str]("the worker in whose tasks this is")

    def runs(run: Any) -> Any:
        async def mutated(self: GridRun) -> None:
            me.set(self._context.role.peer)
            await run(self)

        return mutated

    def plans(before: Any) -> Any:
        def mutated(standing: Standing, living: Mapping[str, int], shapes: Shapes) -> Era | None:
            era: Era | None = before(standing, living, shapes)
            return era if era is None else other(era, living, me.get())

        return mutated

    patches.around(GridRun, "run", runs)
    patches.around(grid_run, "next_era", plans)


def spare_trains(patches: Patches) -> None:
    """A spare believes that it has the last place of the grid, which another worker has."""

    def other(era: Era, living: Mapping[str, int], me: str) -> Era:
        return era if me in era.peers else replace(era, workers=(*era.workers[:-1], (me, living[me])))

    _places(patches, other)


def rows_exchanged(patches: Patches) -> None:
    """One worker believes that the workers of the last column have each other's rows."""

    def other(era: Era, _living: Mapping[str, int], me: str) -> Era:
        if era.number < 1 or me != era.peers[-1]:
            return era
        *before, one, another = era.workers
        return replace(era, workers=(*before, another, one))

    _places(patches, other)


def eras_mixed_up(patches: Patches) -> None:
    """Messages of one era are taken for those of another."""
    patches.around(ScopedEndpoint, "_tag", lambda _: lambda _self, peer, tag: ("era", *tag) if peer not in _self._beyond else tag)


def begins_before_all(patches: Patches) -> None:
    """A worker throws the era before away as soon as it is ready for the next one, whoever else is not."""

    def make(agree: Any) -> Any:
        async def mutated(self: Membership, name: str, *args: Any, **how: Any) -> int:
            return 0 if name.startswith("grid/begun") else int(await agree(self, name, *args, **how))

        return mutated

    patches.around(Membership, "agree", make)


def never_larger(patches: Patches) -> None:
    """A grid stays as small as it has become, and those that come wait for ever as spares, also if it breaks."""
    patches.around(Standing, "over", lambda over: lambda self: over(self) and not self.ended)
