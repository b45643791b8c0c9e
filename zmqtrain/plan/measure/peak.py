"""How fast a device multiplies matrices in single precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zmqtrain.plan.measure.timing import Clock, Patience, clock_of, repeat

#: Rows, columns and depth of the products: large enough that all else is forgotten.
CPU_SIZE, CUDA_SIZE = 1024, 8192


@dataclass(frozen=True, slots=True)
class Peak:
    """Operations a second, the fastest of several products: what the device can do when nothing else is in its way."""

    sgemm: float
    """Of `torch.mm`, which calls the processor maker's library, or another maker's."""
    product: float
    """Of the fastest of all ways to multiply that torch has."""


def measure_peak(device: torch.device, patience: Patience) -> Peak:
    """With as many threads as torch uses now."""
    size = CPU_SIZE if device.type == "cpu" else CUDA_SIZE
    clock = clock_of(device)
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    with torch.no_grad():
        sgemm = _best(lambda: torch.mm(left, right), 2 * size**3, clock, patience)
        if device.type != "cpu":
            return Peak(sgemm, sgemm)
        # Convolutions come from another library than products of matrices, which may know this processor better. A convolution of
        # single pixels, channels last, is the very same product: images of 8 x 8 pixels are 64 rows each.
        images = torch.randn(size // 64, size, 8, 8).to(memory_format=torch.channels_last)
        weights = torch.randn(size, size, 1, 1).to(memory_format=torch.channels_last)
        convolution = _best(lambda: torch.conv2d(images, weights), 2 * size**3, clock, patience)
    return Peak(sgemm, max(sgemm, convolution))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch's operations use so many threads, for a while."""
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
