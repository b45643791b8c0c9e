"""Runs the role that a process was started as."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import TooLateError
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.merged_fc import worker as merged_fc
from zmqtrain.merged_fc.role import run_fc
from zmqtrain.server.role import run_server
from zmqtrain.train.worker import make_work, run_worker

if TYPE_CHECKING:
    from zmqtrain.train.task import Task


async def run_role(context: RoleContext, *, task: Task | None = None) -> None:
    """Run the worker, model server or FC server that the context describes, until it ends.

    ``task``: used by roles that compute, instead of ``[job] task``. Raises the error by which the role fails. A worker that comes
    when the others have trained all there was is none: it leaves.
    """
    if context.role.kind == "worker":
        try:
            await run_worker(context, task=task, make_work=merged_fc.make_work if context.placement.fc_roles else make_work)
        except TooLateError as error:  # nothing is lost without it
            context.recorder.event("too late", reason=error.reason)
            context.membership.come_too_late()
    elif context.role.kind == "fc":
        await _while_needed(run_fc(context, task=task), context.membership.finished, partial(_patience_s, context))
    else:
        await _while_needed(run_server(context), context.membership.finished, partial(_patience_s, context))


async def _while_needed(serving: Coroutine[Any, Any, None], finished: asyncio.Event, patience_s: Callable[[], float]) -> None:
    """Run a server until its workers say that they have finished, or have left without telling it.

    Args:
        serving: the server.
        finished: set when all workers have left.
        patience_s: called then; how long requests in progress may still take.
    """
    server, left = asyncio.ensure_future(serving), asyncio.ensure_future(finished.wait())
    try:
        await asyncio.wait({server, left}, return_when=asyncio.FIRST_COMPLETED)
        if not server.done():
            await asyncio.wait({server}, timeout=patience_s())
            if not server.done():
                return
        await server
    finally:
        for one in (server, left):
            one.cancel()
        await asyncio.wait({server, left})
        if not server.cancelled():
            server.exception()  # raised above; or this role was told to end first, and the server's result does not matter


def _patience_s(context: RoleContext) -> float:
    """None for workers that never sent a server anything, as those of a script that replicates no model."""
    asked = any(received for peer, (_, received) in context.endpoint.traffic().items() if peer != COORDINATOR)
    return context.timeouts.flush_s if asked else 0.0
