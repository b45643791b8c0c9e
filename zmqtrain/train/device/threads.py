"""What real devices take from the process: its clock, its threads, and a way to wait in them."""

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
        except RuntimeError:  # made outside of any loop
            self.clock: Callable[[], float] = time.monotonic
            """Seconds; the loop's clock, so that a dilated world sees its own. May be read in any thread."""
        else:
            self.clock, self._dilation = loop.time, dilation_of(loop)

    def background(self, name: str) -> Background:
        """A thread for something beside the arithmetic."""
        return BackgroundThread(name)

    def condition(self) -> Condition:
        """Something that the compute thread can wait at."""
        return threading.Condition()

    def sleep(self, seconds: float) -> None:
        """Not on the loop's thread: wait for so many of the clock's seconds; not at all where they are over already."""
        if seconds > 0:
            time.sleep(seconds * self._dilation)

    def watch(self, model: nn.Module, optimizer: Optimizer, sizes: Mapping[str, int] | None = None) -> None:
        """Arithmetic takes the time that it takes."""
