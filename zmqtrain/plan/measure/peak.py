"""How fast a device multiplies matrices in single precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zmqtrain.plan.measure.timing import Clock, Patience, clock_of, repeat

#: Rows, columns and depth of the products: large enough to make all overheads negligible.
CPU_SIZE, CUDA_SIZE = 1024, 8192


@dataclass(frozen=True, slots=True)
class Peak:
    """Operations per second of the fastest of several products: what the device can do if nothing disturbs it."""

    sgemm: float
    """With `torch.mm`, which calls a library of the processor's maker, or another one."""
    product: float
    """With the fastest of all ways to multiply that torch has."""


def measure_peak(device: torch.device, patience: Patience) -> Peak:
    """Measure the peak with torch's current number of threads."""
    size = CPU_SIZE if device.type == "cpu" else CUDA_SIZE
    clock = clock_of(device)
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    with torch.no_grad():
        sgemm = _best(lambda: torch.mm(left, right), 2 * size**3, clock, patience)
        if device.type != "cpu":
            return Peak(sgemm, sgemm)
        # Convolutions use another library than matrix products, which may suit this processor better. A convolution of single
        # pixels, channels last, is the same product: images of 8 x 8 pixels are 64 rows each.
        images = torch.randn(size // 64, size, 8, 8).to(memory_format=torch.channels_last)
        weights = torch.randn(size, size, 1, 1).to(memory_format=torch.channels_last)
        convolution = _best(lambda: torch.conv2d(images, weights), 2 * size**3, clock, patience)
    return Peak(sgemm, max(sgemm, convolution))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context in which torch's operations use ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best(run: Callable[[], object], operations: int, clock: Clock, patience: Patience) -> float:
    def once() -> None:
        run()

    return operations / min(repeat(once, clock, patience))
