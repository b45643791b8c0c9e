"""Torch in simulated time: the arithmetic is real, but a profile says how long it takes.

Fetching data, and the servers' updates, take no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from zmqtrain.data.background import AtOnce, Background, Condition
from zmqtrain.membership.context import RoleContext
from zmqtrain.simulate.lockstep import LockstepThread
from zmqtrain.train.device.base import Staging
from zmqtrain.train.device.charged import ChargedTorch

T = TypeVar("T")


class SimulatedTorch(ChargedTorch):
    """Implements `zmqtrain.train.device.base.Device`. Made in the worker's process."""

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self.torch_device = torch.device("cpu")
        self.staging: Staging | None = None
        self._thread = LockstepThread("zmqtrain-compute", lambda: torch.set_num_threads(1))
        self._loop = self._thread._loop

    def clock(self) -> float:
        return self._loop.time()

    def background(self, name: str) -> Background:
        return AtOnce()

    def condition(self) -> Condition:
        return self._thread.condition()

    def spend(self, seconds: float) -> None:
        self._thread.spend(seconds)

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.submit(function)

    async def close(self, timeout_s: float) -> None:
        await self._thread.close(timeout_s)
        self.forget()
