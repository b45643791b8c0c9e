"""Whichever role a process was started as."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqtrain.membership.context import RoleContext
from zmqtrain.server.role import run_server
from zmqtrain.train.fc_role import run_fc
from zmqtrain.train.worker import run_worker

if TYPE_CHECKING:
    from zmqtrain.train.task import Task


async def run_role(context: RoleContext, *, task: Task | None = None) -> None:
    """Be the worker, model server or FC server that the context describes, to its end.

    ``task``: for those that compute, instead of what ``[job] task`` names. Raises what went wrong.
    """
    if context.role.kind == "worker":
        await run_worker(context, task=task)
    elif context.role.kind == "fc":
        await run_fc(context, task=task)
    else:
        await run_server(context)
