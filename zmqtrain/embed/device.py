"""The device of a user's training loop: the loop's own thread computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from zmqtrain.data.bridge import Bridge
from zmqtrain.train.device.base import Staging
from zmqtrain.train.device.threads import RealThreads

T = TypeVar("T")


class CallersDevice(RealThreads):
    """A `Device` whose compute thread is the caller's own."""

    def __init__(
        self,
        bridge: Bridge,
        torch_device: torch.device,
        staging: Staging | None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``within``: makes the context in which functions run."""
        super().__init__()
        self._within = within
        self._bridge = bridge
        self.torch_device = torch_device
        self.staging = staging

    async def run(self, function: Callable[[], T]) -> T:
        def run() -> T:
            with self._within():
                return function()

        return await self._bridge.compute(run)

    async def close(self, timeout_s: float) -> None:
        return None
