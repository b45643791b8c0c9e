"""Functions that are called beside the event loop."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.data.background import AtOnce, Background, BackgroundThread


@pytest.mark.parametrize("make", [lambda: BackgroundThread("test"), AtOnce])
async def test_a_function_that_raises_stop_iteration_does_not_leave_its_caller_waiting(make: type[AtOnce]) -> None:
    """As ``next()`` of an iterator that has ended does; a future takes no such error."""
    background: Background = make()
    with pytest.raises(RuntimeError, match="StopIteration was raised") as raised:
        await asyncio.wait_for(background.submit(lambda: next(iter(()))), 5.0)
    assert isinstance(raised.value.__cause__, StopIteration)
    await background.close(1.0)
