"""Pending operations, and the threads in which they run."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from zmqtrain.c10d.eager import never_compiled
from zmqtrain.c10d.errors import BrokenGroupError, WaitTimeoutError, of_torch
from zmqtrain.train.device.accelerator import accelerator_of

#: Threads that call what a program has attached to futures. More than one, since a callback may wait for other operations, and for
#: futures of theirs; each is started only when all others are busy.
MOST_CALLBACKS = 64


class _Callbacks:
    """The threads, which a forked process does not inherit."""

    def __init__(self) -> None:
        self._pool = self._new()
        os.register_at_fork(after_in_child=self._forked)

    def submit(self, work: Callable[[], None]) -> None:
        self._pool.submit(work)

    def _forked(self) -> None:
        self._pool = self._new()

    @staticmethod
    def _new() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MOST_CALLBACKS, thread_name_prefix="zmqtrain-c10d-callbacks")


_CALLBACKS = _Callbacks()


@never_compiled
class Handle(Work):
    """One operation: torch's work handle."""

    def __init__(self, tensors: Sequence[Tensor], what: str) -> None:
        """``tensors``: the operation's result, once it is done."""
        super().__init__()
        self.what = what
        self._tensors = list(tensors)
        self._future: torch.futures.Future[Any] | None = None
        self._asking = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended. Raises its error, and `TimeoutError` after ``timeout``."""
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self._ended.wait(seconds):
            raise WaitTimeoutError(self.what, seconds or 0.0)
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
        """Completes with the list of result tensors. Callbacks run in threads of their own, and may wait for other operations."""
        with self._asking:
            if self._future is None:
                elsewhere = {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
                self._future = torch.futures.Future(devices=sorted(elsewhere, key=str))
                if self._ended.is_set():
                    self._complete()
            return self._future

    def end(self, error: BaseException | None) -> None:
        """The operation has ended."""
        with self._asking:
            self._error = error
            self._ended.set()
            if self._future is not None:
                _CALLBACKS.submit(self._complete)

    def _complete(self) -> None:
        assert self._future is not None
        if self._error is None:
            self._future.set_result(self._tensors)
        elif isinstance(self._error, Exception):
            self._future.set_exception(self._error)


def after_the_device(tensors: Sequence[Tensor], do: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``do`` for another thread, whose stream is not the caller's: it starts when the work that the caller has queued has run,
    and when it returns, its own queued work has run, too."""
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
    """Carries operations out one after another, in a thread of its own, or in that of a caller who waits."""

    def __init__(self, name: str, goes_on: tuple[type[Exception], ...] = ()) -> None:
        """``goes_on``: errors after which the next operations are carried out; after all others they raise `BrokenGroupError`."""
        self._queue: queue.SimpleQueue[tuple[Handle, Callable[[], None]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._goes_on = goes_on
        self._order = threading.Lock()
        self._pending = 0  # operations that have been submitted, and have not ended
        self._turn = threading.Lock()  # of the thread that carries one out
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        tensors: Sequence[Tensor],
        what: str,
        do: Callable[[], None],
        *,
        reads: Sequence[Tensor] = (),
        waits: bool = False,
    ) -> Handle:
        """Do it after everything submitted before, and after the work that the caller has queued on a device so far.

        ``tensors``: the result. ``reads``: other tensors on the device that it reads. ``waits``: the caller waits for it at once:
        if nothing else is pending, it is done in this thread, before this returns, and no other one has to be woken. Without
        ``waits`` this never blocks.
        """
        handle = Handle(tensors, what)
        waits = waits and not _observed() and all(tensor.device.type == "cpu" for tensor in (*tensors, *reads))
        with self._order:
            here = waits and not self._pending
            self._pending += 1
            if here:
                self._turn.acquire()  # at once: nobody carries anything out
            else:
                self._queue.put((handle, after_the_device([*tensors, *reads], do)))
        if here:
            with torch.no_grad():
                self._carry_out(handle, do)
        return handle

    def close(self) -> None:
        """End after everything submitted so far."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end. Returns whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # a setting of each thread
        while (job := self._queue.get()) is not None:
            self._turn.acquire()
            self._carry_out(*job)
            del job  # it holds references to tensors
        with self._turn:  # what a caller carries out
            pass

    def _carry_out(self, handle: Handle, do: Callable[[], None]) -> None:
        """In this thread's turn, which ends."""
        told: Exception | None = None
        try:
            # After a failed operation the ranks are no longer at the same point.
            if self._error is not None:
                raise BrokenGroupError(handle.what, self._error)
            do()
        except Exception as error:  # noqa: BLE001 - passed to those who wait for the operation
            told = of_torch(error)
            if self._error is None and not isinstance(told, self._goes_on):
                self._error = told
        except BaseException:  # of a caller that is interrupted
            told = self._error = self._error or InterruptedError(f"{handle.what} was interrupted")
            raise
        finally:
            self._turn.release()
            with self._order:
                self._pending -= 1
            handle.end(told)


def _observed() -> bool:
    """Whether this thread has modes that see, or change, every operation on tensors."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
