"""torchft, whose replica groups may die and come back, over the ``zmq`` backend::

    from zmqtrain.integrations.torchft import ProcessGroupZmq

    manager = torchft.Manager(pg=ProcessGroupZmq(), ...)     # in place of ProcessGroupGloo()

torchft decides who takes part, and makes a new group of those at each change. Ranks of one host share memory; between hosts
connections are encrypted (docs/torch-distributed.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, Work
from torchft.process_group import ProcessGroupWrapper

from zmqtrain.c10d.process_group import ZmqProcessGroup
from zmqtrain.c10d.rendezvous import rendezvous
from zmqtrain.c10d.work import Handle

#: Where torchft's manager calls a group from.
_MANAGER = "torchft.manager"


class ProcessGroupZmq(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no types
    """A process group for `torchft.Manager`. ``timeout`` as in torchft's own groups: for connecting, and for each operation.

    An operation of the manager that fails does not raise: its future has the error, and so has `errored`, which the manager asks
    before it lets the optimizer make a step. (An error that is raised at that moment would end the program in torchft's
    DistributedDataParallel.)"""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout=timeout)
        self._error: Exception | None = None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ZmqProcessGroup:
        """Called by torchft in each process of a new group, with a store that only this group uses."""
        self._error = None
        names = [f"rank {each}" for each in range(world_size)]  # torchft's global ranks are not all different
        return ZmqProcessGroup(rendezvous(store, rank, names, self._timeout), rank, world_size, names)

    def allreduce(self, tensors: list[Tensor], opts: object) -> _Work:
        """Sum tensors. Where the manager calls it, a failure is told by the future and by `errored` alone."""
        work: _Work
        if not _asked_by_manager():
            work = super().allreduce(tensors, opts)
            return work
        try:
            work = super().allreduce(tensors, opts)
        except Exception as error:  # noqa: BLE001 - told by the work, as that of an operation that has begun
            work = _Work(_failed(tensors, error))
        work.failed = self._failed
        return work

    def errored(self) -> Exception | None:
        """Why an operation of the manager has failed since the group was made; ``None`` if none has."""
        return self._error

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "torchft-zmq"

    def shutdown(self) -> None:
        """Abandon the group."""
        self.abort(errored=False)

    def _wrap_work(self, work: Handle, opts: object) -> _Work:
        return _Work(work)

    def _failed(self, error: Exception) -> None:
        self._error = self._error or error


class _Work(Work):
    """An operation whose future calls back in the thread that attaches a callback, if the operation has ended.

    torchft counts on that. The backend's own futures use other threads, so that a callback may call collectives; torchft's only
    compute."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle
        self._future: torch.futures.Future[Any] | None = None
        self.failed: Callable[[Exception], None] | None = None
        """Is told of an error, which `wait` then does not raise."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._handle.wait(timeout)
        except Exception as error:
            if self.failed is None:
                raise
            self.failed(error)
            return False

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the list of the operation's tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._handle.is_completed():
                self._settle()
            else:
                self._handle.get_future().add_done_callback(lambda _: self._settle())
        return self._future

    def _settle(self) -> None:
        assert self._future is not None
        error = self._handle.exception()
        if error is None:
            self._future.set_result(self._handle.result())
            return
        if self.failed is not None and isinstance(error, Exception):
            self.failed(error)
        self._future.set_exception(error)


def _asked_by_manager() -> bool:
    """Whether the caller's caller is a method of `torchft.Manager`."""
    return sys._getframe(2).f_globals.get("__name__") == _MANAGER


def _failed(tensors: list[Tensor], error: Exception) -> Handle:
    """An operation that could not begin."""
    handle = Handle(tensors, "all_reduce")
    handle.end(error)
    return handle
