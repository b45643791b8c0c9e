"""All workers begin with rank 0's model, before they divide it."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

from torch import Tensor, nn

from zmqtrain.collectives.group import Group
from zmqtrain.embed.grid.meeting import Meetings
from zmqtrain.errors import TaskError
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.beginning import copy_from_first

Together = Callable[[str, Callable[[Group, str], Awaitable[None]]], Awaitable[None]]


async def begin_alike(model: nn.Module, meetings: Meetings, context: RoleContext, together: Together) -> None:
    """Copy rank 0's parameters and buffers to all workers. On the loop's thread, while the script's thread waits.

    ``together``: runs a function with all workers. Raises `TaskError` if the workers of a group have different kinds of models."""
    tensors: dict[int, Tensor] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    described = [(name, tuple(each.shape), str(each.dtype)) for name, each in (*model.named_parameters(), *model.named_buffers())]
    said = await meetings.meet("replicate()", [float(zlib.crc32(repr(described).encode()))])
    if any(numbers != said[0] for numbers in said):
        raise TaskError(
            "the workers of a group have given session.replicate() models with other names or shapes of parameters: [compute] grid "
            "divides the model, so all must have the same"
        )

    async def copy(group: Group, call: str) -> None:
        for number, tensor in enumerate(tensors.values()):
            if tensor.numel():
                await copy_from_first(group, tensor, (call, number))

    await together("whole model", copy)
