"""Waiting for coroutines: for several as for one, and no longer than a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from zmqtrain.errors import PeerTimeoutError

T = TypeVar("T")


async def together(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all at once. When one raises, the others are cancelled and its error is raised as it is, not in a group."""
    if not coroutines:
        return
    if len(coroutines) == 1:
        await coroutines[0]
        return
    async with task_group() as tasks:
        for coroutine in coroutines:
            tasks.create_task(coroutine)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error of its tasks as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from None


@asynccontextmanager
async def once_set(event: asyncio.Event, then: Callable[[], None]) -> AsyncIterator[None]:
    """A context within which ``then()`` is called once the event is set."""

    async def wait() -> None:
        await event.wait()
        then()

    async with task_group() as tasks:
        waiting = tasks.create_task(wait())
        yield
        waiting.cancel()


async def abandoned(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel all of them, and wait until they have ended. Their errors count as retrieved: nobody waits for them any more."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if cancelled:
        await asyncio.wait(cancelled)
    for task in cancelled:
        if not task.cancelled():
            task.exception()


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await what must not be left halfway: if this is cancelled, however often, that is raised only when it has ended. Its own
    result or error is lost then."""
    whole = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(whole)
    except asyncio.CancelledError:
        while not whole.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({whole})
        if not whole.cancelled():
            whole.exception()  # it counts as retrieved
        raise


def settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    """End a wait for ``future``: it returns, or raises ``error``. Nothing happens where it has ended. A waiter is not needed."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # it counts as retrieved


def first_error(error: BaseException) -> BaseException:
    """The first error that is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def in_time(
    peer: str | Callable[[], str],
    what: str,
    limit_s: float | None,
    setting: str | None = None,
    *,
    why: Callable[[], str] | None = None,
) -> AsyncIterator[None]:
    """Give up what is awaited within after ``limit_s`` seconds (None: never).

    Arguments:
        peer: who is waited for; a function is called when the time is over.
        what: what the peer has to do or to send.
        setting: what to raise if the peer is only slow; ``[job] timeout`` if not given.
        why: called when the time is over: what is known of the reason, or nothing.

    Raises `PeerTimeoutError`. Errors of what is awaited pass through, time-outs of its own included.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except PeerTimeoutError:
        raise
    except TimeoutError:
        if not limit.expired():
            raise
        name = peer if isinstance(peer, str) else peer()
        more = () if setting is None else (setting,)
        raise PeerTimeoutError(name, what, limit_s or 0.0, *more, why=why() if why is not None else "") from None
