"""Several coroutines as one: all end, or the first error ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all at once. When one raises, the others are cancelled and its error is raised as it is, not in a group."""
    if not coroutines:
        return
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(error: BaseException) -> BaseException:
    """The first error that is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
