"""Ranks of one process take turns where they draw random numbers: torch has one generator a process.

The ranks of a group draw the same numbers in their forwards, for each begins with the same state of the generator. Where several
of them are threads of one process (simulations with real arithmetic, tests), one runs its forward at a time, and when it waits for
others it hands over, and takes its own state up again afterwards. A rank that has a process to itself never waits here.

Torch is imported when a turn is used: simulations of modelled devices hand over without it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LOCK = threading.Lock()
#: One thread at a time keeps garbage from being collected: another one that reads a generator would allow it again too early. No
#: process is forked meanwhile, since it would have the lock for ever, and never collect.
_READING = threading.Lock()
os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


class _Thread(threading.local):
    holds = False
    drawing = 0
    outside: Tensor | None = None
    """The state of torch's generator that those outside of forwards have."""


_THREAD = _Thread()


def generator_state(device: torch.device | int | None = None) -> Tensor:
    """`torch.get_rng_state`, which may be called beside other threads that use the generator.

    Torch holds the generator's lock while it makes the tensor's Python object. If that collects garbage, whatever then runs Python
    (tensors that are freed, a callback of `gc`) may hand over the GIL, and a thread that then waits for the lock, as in
    ``torch.manual_seed``, waits with the GIL for ever. So nothing is collected meanwhile.

    Args:
        device: a CUDA device, whose generator it is; ``None``: the processor's.
    """
    import torch

    with _READING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return torch.random.get_rng_state() if device is None else torch.cuda.get_rng_state(device)
        finally:
            if collects:
                gc.enable()


@contextmanager
def torch_reads_so() -> Iterator[None]:
    """Meanwhile torch, too, reads the processor's generator as `generator_state` does: its checkpointing, in each rank's thread."""
    import torch

    before = torch.get_rng_state
    torch.get_rng_state = generator_state
    try:
        yield
    finally:
        torch.get_rng_state = before


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
def generators_kept(devices: Iterable[torch.device | int] = ()) -> Iterator[None]:
    """Afterwards torch's generators are as they were: `torch.random.fork_rng`, beside other threads (`generator_state`).

    It takes a turn (`turn`): what another rank draws meanwhile would be drawn once more by the next one.

    Args:
        devices: the CUDA devices whose generators are kept, besides the processor's.
    """
    import torch

    with turn():
        before, on_devices = generator_state(), {device: generator_state(device) for device in devices}
        try:
            yield
        finally:
            torch.set_rng_state(before)
            for device, state in on_devices.items():
                torch.cuda.set_rng_state(state, device)


@contextmanager
def drawing(seed: int, devices: list[int]) -> Iterator[None]:
    """Torch's generators begin with ``seed``, of the processor and these CUDA devices; afterwards they are as they were."""
    import torch

    from zmqtrain.data.seeding import seed_torch

    with turn(), generators_kept(devices) if devices else nullcontext():
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
