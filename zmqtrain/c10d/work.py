"""Operations under way, and the threads that they run in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from zmqtrain.train.device.accelerator import accelerator_of


class Handle(Work):
    """One operation: torch's work handle."""

    def __init__(self, tensors: Sequence[Tensor], what: str) -> None:
        """``tensors``: the operation's result, once it is done."""
        super().__init__()
        self.what = what
        self._tensors = list(tensors)
        elsewhere = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=sorted(elsewhere, key=str))
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended. Raises what went wrong, and `TimeoutError` after ``timeout``."""
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self._ended.wait(seconds):
            raise TimeoutError(f"{self.what} has not ended within {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the list of result tensors."""
        return self._future

    def end(self, error: BaseException | None) -> None:
        """The operation has ended."""
        self._error = error
        self._ended.set()
        if error is None:
            self._future.set_result(self._tensors)
        elif isinstance(error, Exception):
            self._future.set_exception(error)


def _after_the_device(tensors: Sequence[Tensor], do: Callable[[], None]) -> Callable[[], None]:
    """``do`` for another thread, whose stream is not the caller's: it begins when what the caller has queued has run, and when it
    returns what it has queued itself has run, too."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    accelerator = None if device is None else accelerator_of(device)
    if device is None or accelerator is None:
        return do
    queued = accelerator.event()
    queued.record(accelerator.current(device))

    def work() -> None:
        accelerator.use(device)
        queued.synchronize()
        do()
        accelerator.current(device).synchronize()

    return work


class Lane:
    """A thread that carries operations out one after another."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Handle, Callable[[], None]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, tensors: Sequence[Tensor], what: str, do: Callable[[], None], *, reads: Sequence[Tensor] = ()) -> Handle:
        """Do it after what was submitted before, and after what the caller has queued on a device so far. Never blocks.

        ``tensors``: the result. ``reads``: what else lies on the device.
        """
        handle = Handle(tensors, what)
        self._queue.put((handle, _after_the_device([*tensors, *reads], do)))
        return handle

    def close(self) -> None:
        """End after what was submitted."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end. Returns whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # it is a thread's own
        while (job := self._queue.get()) is not None:
            handle, do = job
            try:
                # Once an operation has failed ranks are not at the same place any more.
                if self._error is not None:
                    raise self._error
                do()
            except Exception as error:  # noqa: BLE001 - whoever waits for the operation is told
                self._error = error
                handle.end(error)
            else:
                handle.end(None)
            del job, handle, do  # they hold tensors
