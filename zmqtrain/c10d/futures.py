"""The futures of operations: what a program attaches callbacks to, in Python and in torch's C++ code."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import graph

from zmqtrain.c10d.eager import never_compiled
from zmqtrain.c10d.order import Following

#: Below what torch's C++ code calls during backward is the frame of this function, which calls nothing else, or none.
_BACKWARD = graph._engine_run_backward.__code__
#: In TorchScript a wait for a future suspends the function, and it goes on in a thread of torch's own.
_SCRIPT = """
def ended(done: Future[List[Tensor]], tensors: List[Tensor], error: Tensor) -> List[Tensor]:
    torch.jit.wait(done)
    if error.numel() > 0:
        codes: List[int] = error.tolist()
        text = ""
        for code in codes:
            text += chr(code)
        raise RuntimeError(text)
    return tensors

def following(done: Future[List[Tensor]], tensors: List[Tensor], error: Tensor) -> Future[List[Tensor]]:
    return torch.jit.fork(ended, done, tensors, error)
"""


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


CALLBACKS = _Callbacks()


@never_compiled
class OperationFuture(torch.futures.Future[Any]):
    """torch's future, whose callbacks may call collectives: they have an order of their own (`zmqtrain.c10d.order`).

    No callback runs in the thread that attaches it, and none waits for another one: on other ranks they may run at other moments.
    """

    def __init__(self, devices: Sequence[torch.device], following: Following | None) -> None:
        """``following``: what its callbacks call; None: their calls are the program's own."""
        super().__init__(devices=list(devices))
        self._on, self._following = list(devices), following
        self._count = itertools.count()
        self._completing = 0  # the thread that does

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """A future of what ``callback`` returns for this one, or of the error that it raises."""
        number = next(self._count)
        following = None if self._following is None else self._following.next(number)
        made = OperationFuture(self._on, following)

        def call(done: Any) -> None:
            try:
                with following or nullcontext():
                    result = callback(done)
            except Exception as error:  # noqa: BLE001 - passed to those who wait
                made.fail(error)
            else:
                made.complete(result)

        self._attach(call, number)
        return made

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        number = next(self._count)
        following = None if self._following is None else self._following.next(number)

        def call(done: Any) -> None:
            with following or nullcontext():
                callback(done)

        self._attach(call, number)

    def complete(self, value: object) -> None:
        """The future has this value. Called in a thread of `CALLBACKS`, or before there are callbacks."""
        self._completing = threading.get_ident()
        try:
            self.set_result(value)
        finally:
            self._completing = 0

    def fail(self, error: Exception) -> None:
        """The future has an error, which waiting for it raises; C++ code that takes its value for tensors raises it, too."""
        self._set_unwrap_func(_Failed.unwrap)
        self.complete(_Failed(error))

    def _attach(self, call: Callable[[Any], None], number: int) -> None:
        def ended(done: Any) -> None:
            if number == 0 and self._completing == threading.get_ident():
                call(done)  # this thread has nothing else to do
            else:
                CALLBACKS.submit(lambda: call(done))

        super().add_done_callback(ended)


class _Failed:
    """The value of a future that has failed. torch's C++ code reads it as a list, or looks for tensors in its pickled form, and a
    plain exception has none, which ends the process with a segmentation fault."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def unwrap(self) -> NoReturn:
        raise self._error

    def __len__(self) -> int:
        raise self._error

    def __getitem__(self, index: int) -> Tensor:
        raise self._error

    def __str__(self) -> str:
        raise self._error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._error


class TensorsFuture:
    """A future whose value is a list of tensors for C++ code, which cannot be made in Python: a scripted function returns it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._done: torch.futures.Future[Any] = torch.futures.Future()
        self._error = torch.empty(0, dtype=torch.int64)
        self.future: torch.futures.Future[Any] = _script().following(self._done, tensors, self._error)

    def end(self, error: BaseException | None) -> None:
        """The operation has ended."""
        if error is not None:
            self._error.set_(torch.tensor(list(f"{type(error).__name__}: {error}".encode())))  # type: ignore[call-overload]
        self._done.set_result(None)


def wanted_by_cpp(tensors: Sequence[Tensor]) -> bool:
    """Whether the caller is asked for a future by torch's hook FP16_COMPRESS, which only takes a `TensorsFuture`.

    Others that ask from C++ understand an `OperationFuture`, and raise its errors as they are.
    """
    if not tensors or tensors[0].dtype is not torch.float16:
        return False
    asks = sys._getframe(1).f_back
    return asks is None or asks.f_code is _BACKWARD


@cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_SCRIPT)
