"""Workers that divide a model between them must do the same things in the same order: they compare what they are about to do.

Each has only a part of the model, so that a forward on one of them alone would wait for the others for ever. Before everything that
they do together they therefore meet: each says what it is about to do, and a few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_gather
from zmqtrain.errors import TaskError
from zmqtrain.wire.tensor import TensorPayload

What = Literal[
    "replicate()",
    "the model's forward",
    "backward()",
    "optimizer.step()",
    "a norm of gradients",
    "unscaling of gradients",
    "model.state_dict()",
    "model.load_state_dict()",
    "optimizer.state_dict()",
    "optimizer.load_state_dict()",
    "a call that all workers make together",
    "the end of the session",
]
_WHATS: tuple[What, ...] = get_args(What)
#: The most numbers that a worker says.
MOST_NUMBERS = 7


class Meetings:
    """One worker's meetings with the others of its group. On the loop's thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._count = 0

    async def meet(self, what: What, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Wait for all workers of the group. Returns the numbers of each, by its position.

        ``numbers``: at most `MOST_NUMBERS`. Raises `TaskError`, on all workers, if they are about to do different things."""
        assert len(numbers) <= MOST_NUMBERS, numbers
        group, width = self._group, 1 + MOST_NUMBERS
        self._count += 1
        said = np.zeros((group.size, width))
        said[group.rank, 0] = _WHATS.index(what)
        said[group.rank, 1 : 1 + len(numbers)] = numbers
        await all_gather(group, TensorPayload.of(said.reshape(-1)), (self._count,))
        first = said[0, 0]
        for rank, other in enumerate(said[:, 0]):
            if other != first:
                raise TaskError(
                    f"{group.members[0]} has come to {_WHATS[int(first)]}, but {group.members[rank]} to {_WHATS[int(other)]}: "
                    "[compute] grid divides the model, so all workers of a group must do the same things in the same order. Let "
                    "all of them evaluate and call state_dict(), and only one print or write the result"
                )
        return [[float(number) for number in row[1 : 1 + len(numbers)]] for row in said]
