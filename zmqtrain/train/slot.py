"""Workers of several groups on one slot take turns: one computes while another waits for the FC server, or for parameters.

The worker of the first of these groups holds the mutex; the others request turns from it over the host's network.
"""

from __future__ import annotations

import asyncio

from zmqtrain.events import Recorder
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.train.mutex import Mutex
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Value


class Slot:
    """A worker's share of a slot. All methods are called on the loop's thread."""

    def __init__(self, endpoint: Endpoint, members: tuple[PeerId, ...], timeout_s: float, recorder: Recorder) -> None:
        """``members``: the workers that share the slot; the first one holds the mutex."""
        self._endpoint, self._owner, self._timeout_s, self._recorder = endpoint, members[0], timeout_s, recorder
        self._mutex = Mutex(members)
        self._granted: dict[PeerId, asyncio.Future[None]] = {}
        self.held = False
        """Whether it is this worker's turn."""
        if self._owner == endpoint.peer:
            endpoint.serve("slot_take", self._on_take)
            endpoint.serve("slot_give", self._on_give)

    @classmethod
    def of(cls, context: RoleContext) -> Slot | None:
        """The slot of a worker; ``None`` if it does not share one."""
        size, role = context.topology.compute.pipeline, context.role
        if size == 1:
            return None
        first = role.group - role.group % size
        members = tuple(context.placement.group_members(group)[role.position] for group in range(first, first + size))
        return cls(context.endpoint, members, context.timeouts.barrier_s, context.recorder)

    async def take(self, step: int) -> None:
        """Wait for this worker's turn in ``step``. Raises `PeerTimeoutError`, or `PeerLostError` if the mutex's holder is gone."""
        assert not self.held
        with self._recorder.span("wait for the slot", "wait", step=step):
            if self._owner == self._endpoint.peer:
                async with in_time("the slot", "the other workers' turns", self._timeout_s):
                    await self._on_take(self._owner)
            else:
                await self._endpoint.request(self._owner, "slot_take", timeout=self._timeout_s)
        self.held = True

    async def give(self) -> None:
        """End this worker's turn; does nothing if it has none."""
        if not self.held:
            return
        self.held = False
        if self._owner == self._endpoint.peer:
            await self._on_give(self._owner)
        else:
            await self._endpoint.request(self._owner, "slot_give", timeout=self._timeout_s)

    async def _on_take(self, caller: PeerId) -> Value:
        now = self._mutex.asked(caller)
        granted = self._granted[caller] = asyncio.get_running_loop().create_future()
        self._grant(now)
        await granted
        return None

    async def _on_give(self, caller: PeerId) -> Value:
        self._grant(self._mutex.given_back(caller))
        return None

    def _grant(self, member: PeerId | None) -> None:
        if member is not None:
            granted = self._granted.pop(member)
            if not granted.done():
                granted.set_result(None)
