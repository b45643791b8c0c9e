"""A worker: one coroutine from the context to the end of training, in any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from zmqtrain.errors import RUN_HAD_ENDED, ConnectivityError, NonFiniteLossError, PeerLostError, TooLateError, ZmqTrainError
from zmqtrain.exchange.make import make_exchange, make_members
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.loop import TrainingPhase, TrainLoop, applies_here
from zmqtrain.train.work import Work
from zmqtrain.waiting import abandoned

if TYPE_CHECKING:
    from zmqtrain.train.task import Task

#: Makes what a worker computes, before it joins any exchange. Raises `TaskError` and `UsageError`.
MakeWork: TypeAlias = "Callable[[RoleContext, Members, Task | None], Awaitable[Work]]"


async def make_work(context: RoleContext, members: Members, task: Task | None = None) -> Work:
    """What this worker computes: the task on its device, or a model of one."""
    if context.modelled:
        from zmqtrain.train.device.profile import Profile
        from zmqtrain.train.modelled_work import ModelledWork

        return ModelledWork(context, members, Profile.of_job(context.topology))
    from zmqtrain.train.torch_work import TorchWork

    return await TorchWork.make(context, members, task)


async def run_worker(context: RoleContext, *, task: Task | None = None, make_work: MakeWork = make_work) -> None:
    """Train to the end, or until the run is halted. Opens nothing, and leaves nothing running.

    Args:
        context: the worker's role, topology and endpoint.
        task: replaces the one that ``[job] task`` names.
        make_work: makes what is computed.

    Returns normally also if the run was halted on purpose (another worker's loss is not finite). Raises `TaskError`, `UsageError`,
    `CheckpointError`, `PeerLostError` and the other errors of the run.
    """
    halted: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
    context.membership.on_halt(lambda reason: None if halted.done() else halted.set_result(reason))
    if context.topology.forms_grids:
        from zmqtrain.train.grid_run import GridRun

        grid = GridRun(context, task)
        try:
            await _train(context, grid.run(), lambda: grid.loop, lambda: grid.took_part, halted, None)
        finally:
            await grid.close()
        await context.membership.leave()
        return
    if context.topology.whole_groups and context.membership.late:
        context = replace(context, generation=await _wait_for_group(context, halted))
    members = make_members(context)
    work = await make_work(context, members, task)
    try:
        loop = TrainLoop(context, work, make_exchange(context, members, whole_updates=work.whole_updates), members)
        await _train(context, loop.run(), lambda: loop, lambda: loop.took_part, halted, members)
    finally:
        await work.close(context.timeouts.grace_s)
    await context.membership.leave()


async def _wait_for_group(context: RoleContext, halted: asyncio.Future[Mapping[str, Any]]) -> str:
    """This worker has come later: wait until all of its group are there, without whom it cannot train. Returns their
    `RoleContext.generation`. Raises `TooLateError` if the others end before."""
    membership = context.membership
    group = context.placement.group_members(context.role.group)
    there = asyncio.create_task(membership.until_here(group), name="wait for the group")
    over = asyncio.create_task(membership.finished.wait(), name="wait for the end of training without this worker")
    ends: list[asyncio.Future[Any]] = [there, over, halted]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await abandoned([there, over])
    if halted.done():
        raise _stopped(halted.result())
    if membership.finished.is_set():
        raise TooLateError(context.role.peer, RUN_HAD_ENDED)
    members = there.result().members
    return "/" + "-".join(str(members[peer].incarnation) for peer in group)


async def _train(
    context: RoleContext,
    training: Coroutine[Any, Any, None],
    current: Callable[[], TrainLoop | None],
    took_part: Callable[[], bool],
    halted: asyncio.Future[Mapping[str, Any]],
    members: Members | None,
) -> None:
    """``current``: the loop that trains now, of those that ``training`` runs; ``None`` if this worker has nothing of the model.
    ``took_part()``: whether this worker has had a part in the training. ``members``: those of that loop, if there is but one."""
    life = asyncio.create_task(training, name=f"training of {context.role.peer}")
    over = asyncio.create_task(_over(context, took_part), name="wait for the end of training without this worker")
    broken = [] if members is None else [asyncio.create_task(members.broken(), name="wait until nobody knows who takes part")]
    try:
        ends: list[asyncio.Future[Any]] = [life, halted, over, *broken]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if any(each.done() for each in broken):
            # What it waits for may never come. But it may also be about to end, or to find that out by itself.
            await asyncio.wait(ends[:3], timeout=context.timeouts.lost_s, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            await life
            return
        if over.done():
            raise TooLateError(context.role.peer, RUN_HAD_ENDED)
        if broken and not halted.done():
            raise broken[0].result()
        if (loop := current()) is None:
            raise _stopped(halted.result())
        await _halt(context, loop, life, halted.result())
    except NonFiniteLossError as error:
        loop = current()
        assert loop is not None, "it has computed the loss"
        kept = await _keep_last_good(context, loop, error)
        await _give_up(context, loop, error)
        raise NonFiniteLossError(error.loss, error.rank, error.step, kept) from None
    except BaseException as error:
        if (loop := current()) is not None:
            await _give_up(context, loop, error, failed=True)
        raise
    finally:
        await abandoned([over, *broken])
        if not life.done():
            life.cancel()
            await asyncio.wait({life})
        if not life.cancelled():
            life.exception()  # already raised above, or a consequence of that error


async def _over(context: RoleContext, took_part: Callable[[], bool]) -> None:
    """Return once the others have ended the training of an elastic run, if this worker comes so late that it has had no part in
    it: what it waits for may never come."""
    membership = context.membership
    await membership.finished.wait()
    if not membership.late or took_part():
        await asyncio.Event().wait()


async def _halt(context: RoleContext, loop: TrainLoop, life: asyncio.Task[None], reason: Mapping[str, Any]) -> None:
    """Another process has stopped the run."""
    if reason.get("kind") != "nan":
        raise _stopped(reason)
    step = int(reason["step"])
    if applies_here(reason, loop.exchange, context.role.group) and loop.step <= step:
        # The worker with the bad loss still takes part in everything before its step: continue up to there, so that all stop
        # together.
        if loop.step == step and loop.phase is TrainingPhase.ENDING:
            life.cancel()
        loop.stop_in = step
        await asyncio.wait({life}, timeout=context.timeouts.barrier_s)
    else:
        loop.work.replica.abort(ConnectivityError(f"the run was halted: {reason.get('message')}"))
        life.cancel()
        await asyncio.wait({life})
    if life.done() and not life.cancelled() and (error := life.exception()) is not None:
        if isinstance(error, NonFiniteLossError):
            raise error
        if not isinstance(error, ConnectivityError):
            raise error
    loop.halted = True
    await loop.save_all(loop.last_good(step), within_s=saving_s(context))
    await _give_up(context, loop, ConnectivityError("the run was halted"))


def _stopped(reason: Mapping[str, Any]) -> PeerLostError:
    peer = str(reason.get("peer", "coordinator"))
    return PeerLostError(peer, str(reason.get("message", "the run was halted")), waiting_for="the end of training")


def saving_s(context: RoleContext) -> float:
    """How long a checkpoint may take in a run that is stopped for a bad loss. Agents end roles after ``request_s``; before that it
    must be known whether there is a checkpoint."""
    return context.timeouts.request_s - 2 * context.timeouts.grace_s


async def _keep_last_good(context: RoleContext, loop: TrainLoop, error: NonFiniteLossError) -> str:
    """This worker's loss is not finite: stop the run, and keep the state before this step. Returns a sentence about that."""
    role = context.role
    reason = {"kind": "nan", "rank": role.index, "group": role.group, "step": error.step, "peer": role.peer, "message": str(error)}
    reason |= {"type": type(error).__name__, "verdict": error.verdict, "exit_code": error.exit_code}
    with suppress(ConnectivityError, TimeoutError):
        await context.membership.halt(reason)
        async with asyncio.timeout(context.timeouts.request_s):
            await context.membership.halted.wait()
        await loop.work.quiet()  # parameters that its forward has not reached may still be on their way
    loop.halted = True
    # Another worker may have had a bad loss earlier: all keep the same checkpoint, that of the first.
    first = context.membership.halt_reason or {}
    step = int(first["step"]) if first.get("kind") == "nan" else error.step
    kept = await loop.save_all(loop.last_good(step), within_s=saving_s(context))
    return "No checkpoint of the last good step could be kept" if kept is None else f"A checkpoint of step {kept} was kept"


async def _give_up(context: RoleContext, loop: TrainLoop, error: BaseException, *, failed: bool = False) -> None:
    """Wake the compute thread and end the exchange, as far as possible within the grace time."""
    loop.work.replica.abort(error)
    with suppress(ZmqTrainError, TimeoutError, ExceptionGroup):
        async with asyncio.timeout(context.timeouts.grace_s):
            await loop.exchange.stop(failed=failed)
