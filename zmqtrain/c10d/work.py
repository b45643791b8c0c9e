"""Pending operations, and the threads in which they run."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from zmqtrain.c10d.eager import never_compiled
from zmqtrain.c10d.errors import BrokenGroupError, MismatchError, WaitTimeoutError, of_torch
from zmqtrain.c10d.futures import CALLBACKS, OperationFuture, TensorsFuture, wanted_by_cpp
from zmqtrain.c10d.order import PROGRAM, Following, Line, OtherStreamError
from zmqtrain.host.team import LOOK_S
from zmqtrain.train.device.accelerator import accelerator_of


@never_compiled
class Handle(Work):
    """One operation: torch's work handle."""

    def __init__(self, tensors: Sequence[Tensor], what: str, following: Callable[[], Following] | None = None) -> None:
        """``tensors``: the operation's result, once it is done. ``following``: what callbacks of its future call, if that has an
        order of its own."""
        super().__init__()
        self.what = what
        self._tensors, self._following = list(tensors), following
        self._future: OperationFuture | None = None
        self._futures_for_cpp: list[TensorsFuture] = []
        self._asking = threading.Lock()
        self._done = False
        self._pending = threading.Lock()  # held until it is done: an event takes ten times as long
        self._pending.acquire()
        self._error: BaseException | None = None
        self.source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended. Raises its error, and `TimeoutError` after ``timeout``."""
        seconds = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        if not self._done:
            if not self._pending.acquire(timeout=-1 if seconds is None else seconds):
                raise WaitTimeoutError(self.what, seconds or 0.0)
            self._pending.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

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
        if wanted_by_cpp(self._tensors):
            return self._future_for_cpp()
        with self._asking:
            if self._future is None:
                elsewhere = {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
                self._future = OperationFuture(sorted(elsewhere, key=str), self._following and self._following())
                if self._done:
                    self._complete()
            return self._future

    def _future_for_cpp(self) -> torch.futures.Future[Any]:
        made = TensorsFuture(self._tensors)
        with self._asking:
            if not self._done:
                self._futures_for_cpp.append(made)
                return made.future
        made.end(self._error)
        return made.future

    def end(self, error: BaseException | None) -> None:
        """The operation has ended."""
        with self._asking:
            self._error = error
            self._done = True
            self._pending.release()
            if self._future is not None:
                CALLBACKS.submit(self._complete)
        for each in self._futures_for_cpp:
            each.end(error)

    def _complete(self) -> None:
        assert self._future is not None
        if self._error is None:
            self._future.complete(self._tensors)
        elif isinstance(self._error, Exception):
            self._future.fail(self._error)


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


@dataclass(eq=False, slots=True)
class _Job:
    """An operation that has not ended."""

    handle: Handle
    do: Callable[[], None]
    stream: int


class _Signal(Enum):
    """To the thread of a lane."""

    LOOK = auto()
    """Another thread has put an operation back."""
    END = auto()
    """There will be no others."""


class Lane:
    """Carries operations out one after another, in a thread of its own, or in that of a caller who waits."""

    def __init__(
        self,
        name: str,
        goes_on: tuple[type[Exception], ...] = (),
        look: Callable[[str], None] = lambda what: None,
        timeout_s: float = math.inf,
    ) -> None:
        """
        Args:
            goes_on: errors after which the next operations are carried out; after all others they raise `BrokenGroupError`.
            look: raises if the operation with this name can never be carried out, since another rank is lost.
            timeout_s: how long an operation waits for one that other ranks carry out before (`zmqtrain.c10d.order`).
        """
        self._queue: queue.SimpleQueue[_Job | _Signal] = queue.SimpleQueue()
        self._line: Line[_Job] = Line()  # of the thread whose turn it is
        self._error: Exception | None = None
        self._goes_on, self._look, self.timeout_s = goes_on, look, timeout_s
        self._order = threading.Lock()
        self._pending = 0  # operations that have been submitted, and have not ended
        self._turn = threading.Lock()  # of the thread that carries one out
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        handle: Handle,
        do: Callable[[], None],
        *,
        reads: Sequence[Tensor] = (),
        waits: bool = False,
        stream: int = PROGRAM,
    ) -> Handle:
        """Do it after everything submitted before, and after the work that the caller has queued on a device so far.

        ``reads``: tensors on the device that it reads, beside its result. ``waits``: the caller waits for it at once: if nothing
        else is pending, it is done in this thread, before this returns, and no other one has to be woken. Without ``waits`` this
        never blocks. ``stream``: whose order it keeps; `OtherStreamError`, raised by ``do``, has another one come before it.
        """
        tensors = (*handle.result(), *reads)
        waits = waits and not _observed() and all(tensor.device.type == "cpu" for tensor in tensors)
        job = _Job(handle, do if waits else after_the_device(tensors, do), stream)
        with self._order:
            here = waits and not self._pending
            self._pending += 1
            if here:
                self._turn.acquire()  # at once: nobody carries anything out
            else:
                self._queue.put(job)
        if here:
            with torch.no_grad():
                self._carry_out(job)
        return handle

    def close(self) -> None:
        """End after everything submitted so far."""
        self._queue.put(_Signal.END)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end. Returns whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # a setting of each thread
        while (job := self._queue.get()) is not _Signal.END:
            self._turn.acquire()
            if isinstance(job, _Job):
                self._line.add(job)
            del job  # it holds references to tensors
            while self._line:
                failure = self._seek()
                self._carry_out(self._line.take(), failure)
                if not self._line:  # who puts an operation back from now on gives a signal
                    break
                self._turn.acquire()
            else:
                self._turn.release()
        with self._turn:  # what a caller carries out
            pass

    def _seek(self) -> Exception | None:
        """Wait for the operation that comes first. Returns why it will not come."""
        first, deadline = self._line.first, time.monotonic() + self.timeout_s
        try:
            while self._line.seeks:
                try:
                    job = self._queue.get(timeout=LOOK_S)
                except queue.Empty:
                    self._look(first.handle.what)
                    if time.monotonic() >= deadline:
                        raise self._other_first(first) from None
                    continue
                if job is _Signal.END:
                    self._queue.put(job)
                    raise self._other_first(first)
                if isinstance(job, _Job):
                    self._line.add(job)
        except Exception as error:  # noqa: BLE001 - passed to those who wait for the operation
            self._line.give_up()
            return of_torch(error)
        return None

    @staticmethod
    def _other_first(job: _Job) -> MismatchError:
        return MismatchError(
            f"{job.handle.what}: other ranks have called another operation before, in a callback of a future or outside of "
            "callbacks, which this rank has not called. All must call the same operations"
        )

    def _carry_out(self, job: _Job, failure: Exception | None = None) -> None:
        """In this thread's turn, which ends. ``failure``: why it cannot be, nor what comes after it."""
        told: Exception | None = None
        ended = True
        try:
            # After a failed operation the ranks are no longer at the same point.
            if self._error is not None:
                raise BrokenGroupError(job.handle.what, self._error)
            if failure is not None:
                self._error = failure
                raise failure
            job.do()
        except OtherStreamError as other:
            ended = False
            self._line.put_back(job, other.stream)
            if threading.current_thread() is not self._thread:
                self._queue.put(_Signal.LOOK)
        except Exception as error:  # noqa: BLE001 - passed to those who wait for the operation
            told = of_torch(error)
            if self._error is None and not isinstance(told, self._goes_on):
                self._error = told
        except BaseException:  # of a caller that is interrupted
            told = self._error = self._error or InterruptedError(f"{job.handle.what} was interrupted")
            raise
        finally:
            self._turn.release()
            if ended:
                with self._order:
                    self._pending -= 1
                job.handle.end(told)


def _observed() -> bool:
    """Whether this thread has modes that see, or change, every operation on tensors."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
