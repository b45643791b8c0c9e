"""Sessions: how a training loop of your own becomes a worker of a run.

Plain code (`session`)::

    with zmqtrain.session() as session:
        model, optimizer = session.replicate(model, optimizer)
        for epoch in range(3):
            for inputs, target in session.batches(dataset, epoch):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                session.report(loss=loss.item())

A coroutine (`join`) does the same with ``await``, and computes in ``await session.run(function)``.

Started by ``zmqtrain launch FILE script.py`` the script runs once on each worker. Started without a launcher it is a world of one
worker, which works just the same: useful for a first try, and in a debugger.

The difference from training alone: a loss must be a *mean* over the worker's samples, and is weighted by their number; for other
losses use `Session.backward`. docs/sessions.md says what loops may do, and what is refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from zmqtrain.data.background import BackgroundThread
from zmqtrain.data.source import Shard
from zmqtrain.embed.core import ENDED, Core, M, O
from zmqtrain.embed.epoch import AsyncBatches, Batches
from zmqtrain.embed.own_run import enter_world
from zmqtrain.embed.place import Place
from zmqtrain.errors import ConnectivityError, RunStopped, UsageError
from zmqtrain.net.loop import run as run_loop
from zmqtrain.train.callback import Callback

T = TypeVar("T")
Number = float | int | str | bool | Tensor


class Session(Place):
    """A worker of the run, for plain code. Made by `session`; use it only in the thread that made it."""

    def replicate(self, model: M, optimizer: O, *, overlap: bool | None = None, callbacks: Sequence[Callback] = ()) -> tuple[M, O]:
        """Keep model and optimizer in sync with the other workers from now on; all begin with rank 0's parameters.

        ``overlap``: whether gradients are sent while backward is running. With False they are summed over the workers when backward
        returns, and the loop may read and change them until ``optimizer.step()``. By default the first steps show which of the two
        the loop needs. With True, ``optimizer.step()`` does not wait for the parameters either: the next forward does, layer by
        layer; call `settle` before you read parameters in any other way.

        With ``[compute] grid`` the group divides the model: until the session ends, each worker has parts of the parameters, and
        all workers of a group must call the model together (docs/sessions.md).

        ``callbacks`` are called in this thread (`zmqtrain.Callback`).

        Returns the same two objects. Every worker must call it once per session, with models and optimizers of the same kind.
        Raises `TaskError` and `UsageError` for what cannot be trained correctly.
        """
        return self._wait(self._core.replicate(model, optimizer, overlap, callbacks), "replicate()")

    def backward(self, total: Tensor, weight: Tensor | float) -> float:
        """``backward()`` of a loss whose mean is weighted: ``total`` is the *sum* of this worker's losses, ``weight`` the sum of
        their weights (how many tokens or samples count, or the weights of their classes). The gradient is that of the sum of all
        workers' totals divided by the sum of all weights; returns this mean loss.

        ::

            total = cross_entropy(output, target, weight=classes, reduction="sum")
            session.backward(total, classes[target].sum())
        """
        return self._core.backward(total, weight)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the whole gradient, with the same result as in one process. Call it between
        ``backward()`` and ``optimizer.step()``. Arguments and result are as in torch."""
        return self._core.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """`torch.nn.utils.clip_grad_value_` for the whole gradient."""
        self._core.clip_grad_value_(clip_value)

    def batches(
        self,
        data: Any,
        epoch: int | None = None,
        *,
        batch_size: int | None = None,
        shard: Shard | None = None,
        first: int | None = None,
    ) -> Batches:
        """This worker's batches of an epoch, as they are collated (tuples ``(input, ..., target)``, mappings, ...), on `device`.

        Args:
            data: a map-style dataset, a stream, or a `torch.utils.data.DataLoader` of either; `zmqtrain.data.source` says which
                settings of a DataLoader are used.
            epoch: the number of the epoch; each has its own order of samples, from the job's seed. By default each call for the
                same data is the next epoch; under ``torch.no_grad()``, for an evaluation, epochs are not counted.
            batch_size: samples of the whole group in a step; by default that of the DataLoader, or ``[compute] batch_size``.
            shard: as `zmqtrain.Task.shard`.
            first: the number of batches of the epoch to skip, if a loop continues in the middle of it; by default none. Not for
                streams.

        Samples that do not fill a step of all groups are left out. A stream ends for all workers when it has ended for one of
        them, so all of them must take its batches equally often.

        ``len()`` of what is returned is the number of batches, for schedules and progress bars; a stream has none (`TypeError`).

        Raises `UsageError` and `TaskError` for data that cannot be divided, and `UsageError` if ``first`` is missing on a worker
        that replaces a lost one in the middle of an epoch (see docs/sessions.md).
        """
        count = partial(self._core.count_batches, data, batch_size, shard, first)
        return Batches(self._each_batch(data, epoch, batch_size, shard, first), count)

    def _each_batch(
        self, data: Any, epoch: int | None, batch_size: int | None, shard: Shard | None, first: int | None
    ) -> Generator[Any]:
        core = self._core
        trains = torch.is_grad_enabled()
        thread = threading.get_ident()
        feed = self._wait(core.begin_batches(data, epoch, batch_size, shard, first, trains=trains), "batches()")
        try:
            while (batch := self._wait(core.next_batch(feed, trains=torch.is_grad_enabled()), "the next batch")) is not None:
                yield batch.inputs[0]
        finally:
            end = "the end of batches()"
            if core.closed:  # the generator was dropped late, and its loader is closed
                pass
            elif threading.get_ident() != thread:  # the garbage collector found it in some thread, that must not wait
                core.bridge.begin(core.guard(core.end_batches(feed)), end)
            else:
                with suppress(ConnectivityError, UsageError):  # this worker is ending, and closes it
                    self._wait(core.end_batches(feed), end)

    def accumulating(self) -> AbstractContextManager[None]:
        """A forward and backward inside this block only add to the gradients. Those of a step's last micro-batch must be
        outside."""
        return nullcontext() if self._core.replicated is None else self._core.replicated.accumulating()

    def report(self, kind: str = "step", /, **values: Number) -> None:
        """Report values of this step (``loss=...``), or of an evaluation (``report("eval", accuracy=...)``), for the table and the
        record. A tensor or array of one element is its number.

        Raises `UsageError` for other values, and `NonFiniteLossError` for a loss that is NaN or infinite, unless ``[job] on_nan =
        "continue"``.
        """
        self._wait(_call(partial(self._core.report, kind, values)), "report()")
        self._core.callbacks.deliver()

    def same(self, tensor: Tensor) -> Tensor:
        """A tensor without samples, for the model's forward: a mask of (times, times), the same on every worker. Needed only if a
        group divides the model (``[compute] grid``); otherwise it is the tensor itself."""
        return self._core.same(tensor)

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        self._wait(self._core.calls.barrier(), "barrier()")

    def all_reduce(self, tensor: Tensor, operation: Literal["sum", "mean"] = "sum") -> Tensor:
        """Sum (or average) the tensor over all workers, in place; the result has the same bits on all. Every worker must call
        it."""
        return self._wait(self._core.calls.all_reduce(tensor, operation), "all_reduce()")

    def settle(self) -> None:
        """Wait until the whole model has the parameters of the last step. Forwards do so by themselves, layer by layer."""
        self._wait(self._core.settle(), "settle()")

    def _wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self._core.bridge.call(self._core.guard(coroutine), what)


class AsyncSession(Place):
    """A worker of the run, for coroutines. Made by `join`; use it only on the loop's thread, except in functions that `run`
    calls."""

    def __init__(self, core: Core, thread: BackgroundThread) -> None:
        super().__init__(core)
        self._thread = thread

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)`` in the session's compute thread: forward, backward and ``optimizer.step()`` must run there.

        Raises what the function raises, and `UsageError` once the session has ended."""
        if self._core.closed:
            raise UsageError(ENDED)
        return await self._thread.submit(partial(function, *arguments))

    async def replicate(
        self, model: M, optimizer: O, *, overlap: bool | None = None, callbacks: Sequence[Callback] = ()
    ) -> tuple[M, O]:
        """Like `Session.replicate`. ``callbacks`` are called in the session's compute thread."""
        core = self._core
        replicate = partial(core.replicate, model, optimizer, overlap, callbacks)
        return await self.run(lambda: core.bridge.call(core.guard(replicate()), "replicate()"))

    def backward(self, total: Tensor, weight: Tensor | float) -> float:
        """As `Session.backward`; call it only inside `run`."""
        return self._core.backward(total, weight)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As `Session.clip_grad_norm_`; call it only inside `run`."""
        return self._core.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """As `Session.clip_grad_value_`; call it only inside `run`."""
        self._core.clip_grad_value_(clip_value)

    def batches(
        self,
        data: Any,
        epoch: int | None = None,
        *,
        batch_size: int | None = None,
        shard: Shard | None = None,
        first: int | None = None,
    ) -> AsyncBatches:
        """Like `Session.batches`."""
        count = partial(self._core.count_batches, data, batch_size, shard, first)
        return AsyncBatches(self._each_batch(data, epoch, batch_size, shard, first), count)

    async def _each_batch(
        self, data: Any, epoch: int | None, batch_size: int | None, shard: Shard | None, first: int | None
    ) -> AsyncGenerator[Any]:
        core = self._core
        feed = await core.begin_batches(data, epoch, batch_size, shard, first, trains=torch.is_grad_enabled())
        try:
            while (batch := await core.guard(core.next_batch(feed, trains=torch.is_grad_enabled()))) is not None:
                yield batch.inputs[0]
        finally:
            if not core.closed:
                with suppress(ConnectivityError, UsageError):  # this worker is ending, and closes it
                    await core.end_batches(feed)

    def accumulating(self) -> AbstractContextManager[None]:
        """As `Session.accumulating`; call it only inside `run`."""
        return nullcontext() if self._core.replicated is None else self._core.replicated.accumulating()

    def report(self, kind: str = "step", /, **values: Number) -> None:
        """Like `Session.report`."""
        self._core.report(kind, values)

    def same(self, tensor: Tensor) -> Tensor:
        """As `Session.same`."""
        return self._core.same(tensor)

    async def barrier(self) -> None:
        """Wait until all workers have called this."""
        await self._core.guard(self._core.calls.barrier())

    async def all_reduce(self, tensor: Tensor, operation: Literal["sum", "mean"] = "sum") -> Tensor:
        """Like `Session.all_reduce`."""
        return await self._core.guard(self._core.calls.all_reduce(tensor, operation))

    async def settle(self) -> None:
        """Like `Session.settle`."""
        await self._core.guard(self._core.settle())


@asynccontextmanager
async def join() -> AsyncIterator[AsyncSession]:
    """Run the worker that the environment names (or a world of one) in the running event loop.

    At the end of the block the model is complete, and this worker has left the run. Raises what `Membership.join` raises.
    """
    stopped: RunStopped | None = None
    async with enter_world() as context:
        core = Core(context)
        thread = BackgroundThread("zmqtrain-compute")
        try:
            try:
                yield AsyncSession(core, thread)
            except RunStopped as stop:
                stopped = stop
            # In the compute thread, since an exchange may still need to compute something.
            await thread.submit(lambda: core.bridge.call(core.guard(core.finish()), "the end of the session"))
            await thread.submit(core.callbacks.deliver)
        finally:  # perhaps cancelled in the middle of `AsyncSession.run`
            await core.close(thread)
    if stopped is not None:
        raise stopped


@contextmanager
def session() -> Iterator[Session]:
    """Run the worker that the environment names (or a world of one), with the event loop in a background thread.

    At the end of the block the model is complete, and this worker has left the run. Raises what `Membership.join` raises.
    """
    with _Background() as core:
        yield Session(core)


class _Background:
    """An event loop in a thread of its own, with a world in it. Plain code enters and leaves it like a ``with`` block."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._core: Core | None = None
        self._leave: asyncio.Event | None = None
        self._error: BaseException | None = None
        # A daemon: a script that ends by an error must not hang on its network.
        self._thread = threading.Thread(target=self._main, name="zmqtrain-loop", daemon=True)

    def __enter__(self) -> Core:
        self._thread.start()
        self._ready.wait()
        if self._core is None:
            self._thread.join()
            assert self._error is not None
            raise self._error
        return self._core

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._core is not None
        assert self._leave is not None
        core, leave = self._core, self._leave
        ended = error is None or isinstance(error, RunStopped)
        try:
            if ended:
                core.bridge.call(core.guard(core.finish()), "the end of the session")
                core.callbacks.deliver()
        finally:
            core.bridge.loop.call_soon_threadsafe(leave.set)
            self._thread.join()
        if ended and self._error is not None:
            raise self._error

    def _main(self) -> None:
        try:
            run_loop(self._live())
        except _GivenUpError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that uses the session
            self._error = error
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._leave = asyncio.Event()
        async with enter_world() as context:
            self._core = core = Core(context)
            self._ready.set()
            try:
                await self._leave.wait()
            finally:
                await core.close()
            if not core.finished:
                raise _GivenUpError


class _GivenUpError(Exception):
    """The plain code failed: the world is closed as after an error, and the error is raised where it happened."""


async def _call(function: Callable[[], T]) -> T:
    """Call a plain function on the loop's thread, as a coroutine, and return its result."""
    return function()
