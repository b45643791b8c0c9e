"""Ranks of one process take turns where they draw random numbers: torch has one generator a process.

The ranks of a group draw the same numbers in their forwards, for each begins with the same state of the generator. Where several
of them are threads of one process (simulations with real arithmetic, tests), one runs its forward at a time, and when it waits for
others it hands over, and takes its own state up again afterwards. A rank that has a process to itself never waits here.

Torch is imported when a turn is used: simulations of modelled devices hand over without it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_LOCK = threading.Lock()


class _Thread(threading.local):
    holds = False
    drawing = 0
    outside: Tensor | None = None
    """The state of torch's generator that those outside of forwards have."""


_THREAD = _Thread()


def generator_state() -> Tensor:
    """`torch.get_rng_state`, which may be called beside other threads that use the generator.

    Torch holds the generator's lock while it makes the tensor's Python object. If that collects garbage, tensors that are freed
    hand over the GIL, and a thread that then waits for the lock, as in ``torch.manual_seed``, waits with the GIL for ever. So
    nothing is collected meanwhile.
    """
    import torch

    collects = gc.isenabled()
    gc.disable()
    try:
        return torch.get_rng_state()
    finally:
        if collects:
            gc.enable()


@contextmanager
def turn() -> Iterator[None]:
    """No other rank of this process draws random numbers meanwhile. A thread may have several within one another."""
    if _THREAD.holds:
        yield
        return
    with _LOCK:
        _THREAD.holds = True
        try:
            yield
        finally:
            _THREAD.holds = False


@contextmanager
def drawing(seed: int, devices: list[int]) -> Iterator[None]:
    """Torch's generators begin with ``seed``, of the processor and these CUDA devices; afterwards they are as they were."""
    import torch

    from zmqtrain.data.seeding import seed_torch

    with turn(), torch.random.fork_rng(devices=devices, enabled=bool(devices)):
        before = generator_state()
        if not _THREAD.drawing:
            _THREAD.outside = before
        _THREAD.drawing += 1
        try:
            seed_torch(seed, devices)
            yield
        finally:
            _THREAD.drawing -= 1
            torch.set_rng_state(before if _THREAD.drawing or _THREAD.outside is None else _THREAD.outside)


@contextmanager
def handing_over() -> Iterator[None]:
    """Others may draw meanwhile: around every wait for them."""
    if not _THREAD.holds:
        yield
        return
    import torch

    state = generator_state()
    if _THREAD.drawing and _THREAD.outside is not None:
        torch.set_rng_state(_THREAD.outside)
    _THREAD.holds = False
    _LOCK.release()
    try:
        yield
    finally:
        _LOCK.acquire()
        _THREAD.holds = True
        if _THREAD.drawing:
            _THREAD.outside = generator_state()
        torch.set_rng_state(state)
