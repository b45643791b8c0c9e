"""What real devices take from the process: its clock, its threads, and a way to wait in them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from zmqtrain.data.background import Background, BackgroundThread, Condition


class RealThreads:
    """The part of `zmqtrain.train.device.base.Device` that is the same for all real devices."""

    def __init__(self) -> None:
        try:
            self.clock: Callable[[], float] = asyncio.get_running_loop().time
            """Seconds; the loop's clock, so that a dilated world sees its own. May be read in any thread."""
        except RuntimeError:  # made outside of any loop
            self.clock = time.monotonic

    def background(self, name: str) -> Background:
        """A thread for something beside the arithmetic."""
        return BackgroundThread(name)

    def condition(self) -> Condition:
        """Something that the compute thread can wait at."""
        return threading.Condition()

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Arithmetic takes the time that it takes."""
