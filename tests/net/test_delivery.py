from __future__ import annotations

import asyncio
import gc
import weakref
from typing import cast

import numpy as np

from zmqtrain.net.delivery import Delivery
from zmqtrain.net.link import Link
from zmqtrain.net.outbox import BULK, Outbox, Outgoing
from zmqtrain.wire.message import describe
from zmqtrain.wire.tensor import TensorPayload


async def test_what_was_waited_for_is_freed_though_python_looks_for_no_cycles() -> None:
    """Otherwise all tensors that are sent one after another, each made for it, are in memory together."""
    array = np.zeros(100)
    alive = weakref.ref(array)
    header, frames = describe(TensorPayload.of(array), ("x",))
    message = Outgoing(header, frames)
    outbox, delivery = Outbox(10_000, 10_000), Delivery(message, cast(Link, None))
    outbox.put(message)
    wait = asyncio.create_task(delivery.wait_released())
    await asyncio.sleep(0)
    outbox.next(BULK, credit=True)
    outbox.cut(message, 0)
    outbox.acknowledged(message)
    outbox.next(BULK, credit=True)  # forgets what has been passed on
    await wait
    gc.disable()
    try:
        del array, frames, message, delivery, wait
        assert alive() is None
    finally:
        gc.enable()
