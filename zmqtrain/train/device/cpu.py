"""Torch on the CPU, in one compute thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from zmqtrain.data.background import BackgroundThread
from zmqtrain.train.device.base import Staging
from zmqtrain.train.device.threads import RealThreads

T = TypeVar("T")


class CpuDevice(RealThreads):
    """Torch on the CPU; tensors lie in memory that the network reads and writes itself."""

    def __init__(self, threads: int = 0) -> None:
        """``threads``: how many threads torch may use; 0 leaves torch's own choice."""
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.staging: Staging | None = None
        self._thread = BackgroundThread("zmqtrain-compute", lambda: _use_threads(threads))

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.submit(function)

    async def close(self, timeout_s: float) -> None:
        await self._thread.close(timeout_s)


def _use_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
