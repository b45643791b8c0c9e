"""Processes that read batches, with torch's `DataLoader`, to which requests are given in place of indices.

A worker of a run has threads, sockets and memory that it shares with other processes. Its loader processes are forked from it (as
torch does by default), since a dataset often cannot be sent to another process. They use nothing else that they inherit: they leave
signals to the worker, and they end when it ends, without running its exit handlers.

In a process forked while another thread holds a lock, that lock is never released, and the first thing that torch does there is to
seed its generator, whose lock a dropout holds while it draws. So processes are started only while nothing is being computed: before
the first batch, and before the last batch of an epoch is handed out (`LoaderProcesses.prepare`). If a thread of the user's own
holds such a lock all the same, the wait for the processes ends with an error.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from zmqtrain.data.file_modules import Files
from zmqtrain.data.nested import PLAIN, leaves
from zmqtrain.data.partition import Indices
from zmqtrain.death import die_with_parent
from zmqtrain.errors import TaskError
from zmqtrain.words import typed

#: The longest temporary folder, in bytes: the path of a Unix socket has at most 107, of which multiprocessing's names take 32.
LONGEST_FOLDER = 75
#: How long processes may take to start, in seconds: those that are not forked first import torch and what the dataset needs.
BEGIN_S = 120.0
#: Frames of files under these paths do not belong to the user's code.
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a loader process."""

    step: int
    indices: Indices
    seed: tuple[int, ...]

    def same(self, other: Request) -> bool:
        """Whether both ask for the same samples."""
        return self.step == other.step and len(self.indices) == len(other.indices) and bool((self.indices == other.indices).all())


@dataclass(frozen=True, slots=True)
class Processes:
    """How many processes read, and how; names and meanings are those of `torch.utils.data.DataLoader`."""

    num_workers: int
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], Any] | None = None
    multiprocessing_context: Any = None
    """``None``: fork, if the system has it."""
    timeout: float = 0.0


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error that the user's code raised in a loader process."""

    message: str
    trace: str


class LoaderTraceback(Exception):
    """The traceback of a loader process, as text; the cause of the `TaskError` that the worker raises."""

    def __init__(self, trace: str) -> None:
        self.trace = trace
        super().__init__(f"in a loader process\n\n{trace}")


def _fork_with_torch_s_locks() -> None:
    """A loader process begins by seeding torch, which takes a lock for each kind of device. Forked while another thread seeds, it
    would find such a lock taken for ever. So a fork takes these locks first, and releases them in both processes."""
    for module in (torch.cuda, getattr(torch, "xpu", None), getattr(torch, "mtia", None)):
        lock = getattr(module, "_initialization_lock", None)
        if lock is not None:
            os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


_fork_with_torch_s_locks()


class LoaderProcesses:
    """Batches of successive steps, read ahead by processes. All methods are called in one thread, which must outlive them."""

    def __init__(
        self,
        read: Callable[[Any], Any],
        request: Callable[[int], Any],
        processes: Processes,
        epoch_steps: int = 0,
        *,
        begin_s: float = BEGIN_S,
    ) -> None:
        """``read(request(step))`` is what a process does. ``epoch_steps``: see `zmqtrain.data.loader.Loader`. ``begin_s``: how long
        processes may take to start."""
        self._read, self._request, self._processes = read, request, processes
        self._epoch_steps = 0 if processes.persistent_workers else epoch_steps
        self._loader: DataLoader[Any] | None = None
        self._replies: Iterator[tuple[Any, Any]] | None = None
        self._next = 0
        self._begin_s = begin_s
        self._begun: Any = None
        """A semaphore, released by each process that has started; ``None`` once all have."""

    def begins_with(self, step: int) -> bool:
        """Whether ``step``, the first of an epoch, needs new processes; if so, call `prepare`."""
        return self._epoch_steps > 0 and step % self._epoch_steps == 0

    def prepare(self, step: int) -> None:
        """Start the processes of the epoch that begins with ``step``. Call it while nothing is being computed, since they are
        forked."""
        self.renew()
        self._begin(step)

    def take(self, request: Any) -> Any:
        """What was read for the request. If it was read ahead, as the next step's is, this takes no time; otherwise reading starts
        anew.

        Raises `TaskError` if the user's code raises, or a process dies."""
        step = request.step
        if self._replies is None or step != self._next:
            self._begin(step)
        found = self._reply()
        if found is None:  # the epoch has ended, and its processes with it
            self.renew()
        if found is None or not found[0].same(request):  # other samples belong to this worker by now
            self._begin(step)
            found = self._reply()
        assert found is not None
        self._next = step + 1
        return found[1]

    def renew(self) -> None:
        """End the processes; others are started when something is to be read again."""
        self._replies = self._loader = None  # torch ends them once their iterator is freed

    def _begin(self, step: int) -> None:
        self._replies = None
        self._next = step
        if self._loader is None:
            self._loader = self._make()
        try:
            self._replies = iter(self._loader)
        except OSError as error:
            raise TaskError(f"a loader process cannot be started ({error}): use fewer num_workers") from error
        except Exception as error:  # anything that the user's objects raise when they are pickled
            raise TaskError(
                f"the task's data cannot be sent to a loader process ({type(error).__name__}: {error}); forked processes need not "
                "be sent anything: leave multiprocessing_context at its default"
            ) from error

    def _reply(self) -> tuple[Any, Any] | None:
        """The next reply; ``None`` at an epoch's end."""
        assert self._replies is not None
        workers = getattr(self._replies, "_workers", [])
        if self._begun is not None:
            self._wait_until_begun(workers)
        try:
            request, read = next(self._replies)
        except StopIteration:
            return None
        except (RuntimeError, OSError, EOFError) as error:  # the latter two if it dies while it sends a batch
            raise _died(error, workers) from error
        if isinstance(read, _Failed):
            raise TaskError(read.message) from LoaderTraceback(read.trace)
        return request, read

    def _wait_until_begun(self, workers: list[Any]) -> None:
        """Raises `TaskError` if a process is stuck before it has reached any of the user's code."""
        waiting, deadline = len(workers), time.monotonic() + self._begin_s
        while waiting and all(worker.exitcode is None for worker in workers):  # a dead one is noticed when its reply is awaited
            if self._begun.acquire(timeout=0.5):
                waiting -= 1
            elif time.monotonic() > deadline:
                for worker in workers:
                    worker.kill()
                self.renew()
                raise TaskError(
                    f"{waiting} of the {len(workers)} loader processes of the task's data (num_workers) did not start within "
                    f"{self._begin_s:g} s. They were probably forked while another thread of the program held a lock, such as that "
                    "of torch's random numbers, and now wait for it for ever. Do not run threads that compute beside the training, "
                    "or "
                    'set multiprocessing_context = "forkserver" (or "spawn") or num_workers = 0'
                )
        self._begun = None

    def _steps(self) -> Iterator[Any]:
        step = self._next
        while True:
            yield self._request(step)
            step += 1
            if self._epoch_steps and step % self._epoch_steps == 0:
                return

    def _make(self) -> DataLoader[Any]:
        how = self._processes
        context = how.multiprocessing_context
        if context is None and sys.platform == "linux":
            context = "fork"
        start = context if isinstance(context, str) else None if context is None else context.get_start_method()
        parent = os.getpid() if start in ("fork", "spawn") else None
        made = multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._begun = made.Semaphore(0)
        return DataLoader(
            _Served(self._read),  # type: ignore[arg-type]  # has a dataset's methods
            batch_size=None,
            sampler=_Steps(self._steps),
            collate_fn=_as_it_is,
            num_workers=how.num_workers,
            prefetch_factor=how.prefetch_factor,
            persistent_workers=True,
            worker_init_fn=partial(_begin_process, parent, self._begun, how.worker_init_fn),
            multiprocessing_context=context,
            timeout=how.timeout,
            generator=torch.Generator().manual_seed(0),  # otherwise torch would draw from the model's generator
        )


class _Steps:
    """The sampler: requests from the loader's current position."""

    def __init__(self, steps: Callable[[], Iterator[Any]]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        return self._steps()


class _Served:
    """The dataset: returns what is read for a request. Runs in a loader process."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.files = Files()  # first, as attributes are pickled in this order
        self.read = read

    def __getitem__(self, request: Any) -> tuple[Any, Any]:
        try:
            read = self.read(request)
            for leaf in leaves(read):
                _check_sent(leaf)
        except TaskError as error:
            return request, _Failed(str(error), _trace_of(error.__cause__ or error))
        return request, read

    def __len__(self) -> int:
        return sys.maxsize


def _trace_of(error: BaseException) -> str:
    """The traceback of the user's code, without the frames of its callers."""
    trace = traceback.TracebackException.from_exception(error)
    own = [not frame.filename.startswith(_PACKAGE) for frame in trace.stack]
    if True in own:
        trace.stack = traceback.StackSummary.from_list(trace.stack[own.index(True) :])
    return "".join(trace.format())


def _as_it_is(read: Any) -> Any:
    return read


def _check_sent(leaf: Any) -> None:
    """Raise `TaskError` for values that cannot be sent: torch would print the error, and wait for ever."""
    if isinstance(leaf, (*PLAIN, torch.Tensor)):
        return
    try:
        ForkingPickler.dumps(leaf)
    except Exception as error:
        raise TaskError(
            f"a batch holds {typed(leaf)}, which a loader process cannot send ({error}): convert it to tensors, or set "
            "num_workers = 0"
        ) from error


def _begin_process(parent: int | None, begun: Any, init: Callable[[int], Any] | None, number: int) -> None:
    """Called first in a loader process. ``parent``: the worker's process id, unless another process is in between."""
    signal.set_wakeup_fd(-1)  # the file belongs to the worker, which would take this process's signals for its own
    if parent is not None:
        die_with_parent(parent)
    _keep_sockets_short()
    begun.release()
    info = get_worker_info()
    if info is not None and hasattr(info.dataset, "read"):
        # The user's code expects its own dataset here.
        object.__setattr__(info, "dataset", getattr(info.dataset.read, "dataset", None))
    if init is not None:
        init(number)


def _keep_sockets_short() -> None:
    """Use /tmp if the temporary folder's path is too long. Tensors are handed over by sockets there; if the path is too long for
    one, torch would only print an error, and the worker would wait for ever."""
    if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER:
        return
    before, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        util.get_temp_dir()  # caches the folder
    finally:
        tempfile.tempdir = before


def _died(error: Exception, workers: list[Any]) -> TaskError:
    """The error for what torch raises if a process is gone, or answers too late."""
    codes = [worker.exitcode for worker in workers if worker.exitcode]
    ends = ", ".join(signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes)
    hint = ""
    if codes and -codes[0] == signal.SIGBUS:
        hint = "; its shared memory is full: give the container a larger /dev/shm (--shm-size), or lower num_workers"
    elif codes and -codes[0] == signal.SIGKILL:
        hint = "; it may have been killed because the host ran out of memory"
    said = f" ({ends}){hint}" if ends else ""
    return TaskError(f"a loader process of the task's data has died or does not answer{said}: {error or type(error).__name__}")
