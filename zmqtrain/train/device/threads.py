"""What real devices take from the process: its clock, its threads, and a condition to wait at."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import Optimizer

from zmqtrain.data.background import Background, BackgroundThread, Condition
from zmqtrain.net.loop import dilation_of


class RealThreads:
    """The part of `zmqtrain.train.device.base.Device` that is the same for all real devices."""

    def __init__(self) -> None:
        self._dilation = 1.0
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # made outside any loop
            self.clock: Callable[[], float] = time.monotonic
            """Seconds, on the loop's clock, so that a dilated world sees its own time. May be read in any thread."""
        else:
            self.clock, self._dilation = loop.time, dilation_of(loop)

    def background(self, name: str) -> Background:
        """A thread for work beside the arithmetic."""
        return BackgroundThread(name)

    def condition(self) -> Condition:
        """A condition at which the compute thread can wait."""
        return threading.Condition()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` of the device's clock; not at all if that is negative. Not on the loop's thread."""
        if seconds > 0:
            time.sleep(seconds * self._dilation)

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sizes: Mapping[str, int] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Nothing to do: real arithmetic takes the time that it takes."""
