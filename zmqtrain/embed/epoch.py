"""What `Session.batches` returns: an epoch's batches, whose number is known before the first of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any


class _Counted:
    """Something that yields ``count()`` batches; the count is asked for only by who wants it."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def __len__(self) -> int:
        """The number of batches, the same before, during and after the iteration. Raises `TypeError` for a stream."""
        return self._count()

    def __bool__(self) -> bool:
        return True


class Batches(_Counted, Iterator[Any]):
    """This worker's batches of an epoch. The epoch begins with the first of them."""

    def __init__(self, batches: Generator[Any], count: Callable[[], int]) -> None:
        super().__init__(count)
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        """End the epoch here. A loop that has ended, or that is left by ``break``, needs not call this."""
        self._batches.close()


class AsyncBatches(_Counted, AsyncIterator[Any]):
    """The same as `Batches`, to be iterated by ``async for``."""

    def __init__(self, batches: AsyncGenerator[Any], count: Callable[[], int]) -> None:
        super().__init__(count)
        self._batches = batches

    async def __anext__(self) -> Any:
        return await anext(self._batches)

    async def aclose(self) -> None:
        """End the epoch here."""
        await self._batches.aclose()
