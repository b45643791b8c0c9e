"""An exchange with nobody: the replica is updated on the spot. Fake with real behaviour, for tests of the worker alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from zmqtrain.exchange.base import Bucket, Optimize, Replica
from zmqtrain.wire.payload import Value


class LocalExchange:
    synchronous = True
    averaged = False

    def __init__(self, when: Optimize = Optimize.APART) -> None:
        self.when = when
        self.order: list[int] = []
        self._all = asyncio.Event()

    async def start(self, replica: Replica, *, restored: bool = False) -> None:
        self.replica = replica
        replica.optimize(self.when)

    def begin_step(self, step: int) -> None:
        self.order.clear()
        self._all.clear()

    def exchanges(self, step: int) -> bool:
        return True

    async def sit_out(self, step: int) -> None:
        return None

    async def may_begin(self, step: int) -> bool:
        return True

    def repeats(self, step: int) -> bool:
        return False

    def bucket_ready(self, bucket: Bucket) -> None:
        self.order.append(bucket.index)
        if len(self.order) == len(self.replica.buckets):
            self._all.set()

    async def end_step(self) -> None:
        await self._all.wait()
        if self.when is Optimize.APART:
            await self.replica.update()
        else:
            for bucket in self.replica.buckets:
                self.replica.parameters_ready(bucket)

    async def settle(self) -> None:
        return None

    async def stop(self, *, failed: bool = False) -> None:
        return None

    def staleness(self) -> Sequence[int]:
        return ()

    def state_dict(self) -> dict[str, Value]:
        return {}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        return None
