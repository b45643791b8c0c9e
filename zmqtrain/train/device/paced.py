"""Torch in real time, slowed down to a profile: what a modelled device is in a job that is trained and not simulated.

The arithmetic runs on the CPU and takes a part of the time; the compute thread waits for the rest. So the device is never faster
than its profile, but slower if this machine is slower: then use ``--dilation``.
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
        self._until = 0.0  # when all charged time has passed

    def spend(self, seconds: float) -> None:
        """Let the time pass. If the arithmetic took longer, the work that follows catches up, until the next wait for other
        workers."""
        self._until += seconds
        self.sleep(self._until - self.clock())

    def condition(self) -> Condition:
        return _Waiting(super().condition(), self._restart)

    async def run(self, function: Callable[[], T]) -> T:
        def timed() -> T:
            self._restart()
            return function()

        return await super().run(timed)

    async def close(self, timeout_s: float) -> None:
        await super().close(timeout_s)
        self.forget()

    def _restart(self) -> None:
        self._until = self.clock()


class _Waiting:
    """Implements `zmqtrain.data.background.Condition`: time waited at it does not count as computing."""

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
