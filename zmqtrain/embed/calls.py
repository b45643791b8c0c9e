"""What all workers of a session call together, besides their steps: barriers, sums, agreements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import numpy as np
from torch import Tensor

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.embed.grid.meeting import Meetings
from zmqtrain.embed.other_loops import OtherLoops
from zmqtrain.embed.replicated import Replicated
from zmqtrain.errors import UsageError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.client import Membership
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.words import typed

T = TypeVar("T")


class Calls:
    """The calls of one worker. All methods on the loop's thread."""

    def __init__(
        self, members: Members, membership: Membership, others: OtherLoops, replicated: Callable[[], Replicated | None]
    ) -> None:
        """``replicated()``: the replicated model, once there is one."""
        self._members, self._membership, self._others, self._replicated = members, membership, others, replicated
        self._calls: Counter[str] = Counter()  # by name
        self._since = 0  # the step from which they are counted
        self.meetings: Meetings | None = None
        """Those of the workers that divide the model."""

    @property
    def step(self) -> int:
        """The step that the loop is at."""
        replicated = self._replicated()
        return 0 if replicated is None else replicated.step

    async def barrier(self) -> None:
        """Wait until all have called it."""

        async def nothing(_group: Group, call: str) -> None:
            if not self._members.survives:
                await self._membership.barrier(call)

        await self.together("session-barrier", nothing)

    async def agree(self, mine: bool) -> bool:
        """Whether all say so."""

        async def agree(group: Group, call: str) -> bool:
            if group.size == 1:
                return mine
            flag = TensorPayload.of(np.array([mine], np.float64))
            await all_reduce(group, flag, (call,))
            return bool(flag.numpy()[0] == group.size)

        return await self.together("agree", agree)

    async def all_reduce(self, tensor: Tensor, operation: Literal["sum", "mean"]) -> Tensor:
        """Replace the tensor with the sum or the mean of all workers' tensors, and return it."""
        if operation not in ("sum", "mean"):
            raise UsageError(f'all_reduce: the operation must be "sum" or "mean", not {operation!r}')
        if not isinstance(tensor, Tensor):
            raise UsageError(f"all_reduce takes a tensor, such as torch.tensor(value), not {typed(tensor)}")
        if operation == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UsageError(f'all_reduce(..., "mean") of {tensor.dtype}, which holds no fractions: use tensor.double()')
        flat = tensor.detach().cpu().contiguous()
        own = flat.clone() if self._members.survives else None

        async def reduce(group: Group, call: str) -> None:
            if own is not None:  # there may have been an earlier attempt in which another worker was lost
                flat.copy_(own)
            payload = TensorPayload.of(flat)
            await all_reduce(group, payload, (call,))
            if operation == "mean":
                payload.scale_(1.0 / group.size)

        await self.together("all_reduce", reduce)
        if flat.device != tensor.device or flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return tensor

    async def together(self, what: str, run: Callable[[Group, str], Awaitable[T]]) -> T:
        """``run(group, call)`` with all workers that trained the previous step and are still in the run. All of them must call it
        equally often. ``call`` identifies the same call on all workers."""
        step, replicated = self.step, self._replicated()
        if not self._members.survives:
            step = 0  # asynchronous groups are at different steps
        elif step != self._since:
            # Counted anew in each step, so that workers that joined late count like the others.
            self._calls, self._since = Counter(), step
        if self._members.late and (replicated is None or step == replicated.first_step):
            raise UsageError(
                f"this worker replaces one that was lost, and the others, at step {step}, wait for it only from its first step "
                f"on: on such a worker, skip calls that all workers make together before the loop"
            )
        if self.meetings is not None:
            await self.meetings.meet("a call that all workers make together")
        call = f"{what}/{step}/{self._calls[what]}"
        self._calls[what] += 1
        together = self._members.together(call, step, lambda group: run(group, call))
        if self._members.survives or not self._others.any:
            return await together
        sums = 0 if replicated is None else replicated.scope.sums
        return await self._others.call(what, self.step, sums, together)
