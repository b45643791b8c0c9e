"""Torch in real time, as slow as a profile says: what a modelled device is where its job is trained and not simulated.

The arithmetic is done on the CPU and takes a part of the time; for what is left of it the compute thread waits. So the device is
never faster than its profile, and slower where this machine is: then dilate (``--dilation``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zmqtrain.data.background import Condition
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.device.charged import ChargedTorch
from zmqtrain.train.device.cpu import CpuDevice

T = TypeVar("T")


class PacedTorch(ChargedTorch, CpuDevice):
    """Implements `zmqtrain.train.device.base.Device`."""

    def __init__(self, context: RoleContext) -> None:
        ChargedTorch.__init__(self, context)
        CpuDevice.__init__(self, context.role.threads or 1)
        self._until = 0.0  # when what has been charged so far is over

    def spend(self, seconds: float) -> None:
        """What arithmetic is late is made up for by what follows, up to the next wait for others."""
        self._until += seconds
        self.sleep(self._until - self.clock())

    def condition(self) -> Condition:
        return _Waiting(super().condition(), self._restart)

    async def run(self, function: Callable[[], T]) -> T:
        def timed() -> T:
            self._restart()
            return function()

        return await super().run(timed)

    def _restart(self) -> None:
        self._until = self.clock()


class _Waiting:
    """Implements `zmqtrain.data.background.Condition`: no time that was waited at it counts as computing."""

    def __init__(self, inner: Condition, waited: Callable[[], None]) -> None:
        self._inner, self._waited = inner, waited

    def __enter__(self) -> bool:
        return self._inner.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._inner.__exit__(*exc_info)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if predicate():
            return True
        try:
            return self._inner.wait_for(predicate, timeout)
        finally:
            self._waited()

    def notify_all(self) -> None:
        self._inner.notify_all()
