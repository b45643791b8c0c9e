"""Dropout whose masks do not depend on the grid: any grid drops what a single process would.

Whether an element is dropped is a hash of the seed, the layer, the step, how often the layer has been called in the step, the
sample's index in the whole batch, and the element's position in the whole sample. Every process computes the masks of the elements
that it holds, and nothing else.

The hash: BLAKE2 makes a key of 64 bits of the first four; the sample's index and the key become two numbers, and two rounds of a
32-bit integer mixer (shifts, exclusive or, multiplication) on these and the position a number below 2^32, whose size decides. It is
integer arithmetic on int64 without overflow, so that all devices and releases of torch agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Block, Placement

_32_BITS = (1 << 32) - 1
#: Odd numbers below 2^31, so that their product with a number below 2^32 is one below 2^63.
_MULTIPLIERS = 0x21F0AAAD, 0x735A2D97

#: Elements whose numbers stay in a processor's cache while they are computed, which nearly halves the time.
_AT_ONCE = 1 << 15


@dataclass(slots=True)
class Batch:
    """The batch that a group works on. One object for all layers of a model; the code that runs the steps keeps it up to date."""

    size: int
    """Samples of the whole group."""
    step: int = 0


class Masks:
    """The masks of one layer."""

    def __init__(self, site: Site, batch: Batch, seed: int) -> None:
        self.site, self.batch, self.seed = site, batch, seed
        self._step, self._calls = -1, 0
        self.draw: Callable[[], int] | None = None
        """What numbers calls, where they are not counted: a forward that is computed again for its backward must get the same."""

    def begin(self) -> int:
        """The number of a new call: its masks differ from those of the calls before in this step."""
        if self.draw is not None:
            return self.draw()
        if self.batch.step != self._step:
            self._step, self._calls = self.batch.step, 0
        self._calls += 1
        return self._calls

    def drop(self, x: Tensor, probability: float, placement: Placement, call: int | None = None) -> Tensor:
        """``x``, which lies as ``placement`` says, with elements set to zero and the others scaled. Raises `UsageError`."""
        shape = placement.whole_shape(x.shape, self.batch.size)
        return x * self.scale(shape, probability, placement, x, call)

    def scale(
        self, shape: tuple[int, ...], probability: float, placement: Placement, like: Tensor, call: int | None = None
    ) -> Tensor:
        """What to multiply this process's part of an activation of whole ``shape`` with: 0 or 1 / (1 - probability)."""
        block = placement.block(shape, self.site.rank)
        if any(stop - start != length for (start, stop), length in zip(block, like.shape, strict=True)):
            raise UsageError(
                f"layer {self.site.layer}: a part of shape {tuple(like.shape)}, where a batch of {self.batch.size} samples has "
                f"{placement.local_shape(shape, self.site.rank)}"
            )
        key = f"{self.seed}/{self.site.layer}/{self.batch.step}/{self.begin() if call is None else call}"
        return self._scale(key, shape, probability, block, placement.sample_dimension or 0, like)

    def of_block(
        self, shape: tuple[int, ...], probability: float, block: Block, sample_dimension: int, like: Tensor, call: int
    ) -> Tensor:
        """The same for any block of an activation, of whatever batch. ``call``: another number for each call of a step."""
        key = f"{self.seed}/{self.site.layer}/{self.batch.step}/{call}"
        return self._scale(key, shape, probability, block, sample_dimension, like)

    @staticmethod
    def _scale(key: str, shape: tuple[int, ...], probability: float, block: Block, sample_dimension: int, like: Tensor) -> Tensor:
        kept = keep(key, probability, block, shape, sample_dimension, like.device)
        return kept.to(like.dtype).div_(max(1 - probability, 1e-30))


def keep(key: str, probability: float, block: Block, shape: tuple[int, ...], sample_dimension: int, device: torch.device) -> Tensor:
    """Which elements of a block of an activation of ``shape`` are kept: true with 1 - ``probability``."""
    if device.type == "meta":
        return torch.empty([stop - start for start, stop in block], dtype=torch.bool, device=device)
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    keys = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    sample = torch.arange(*block[sample_dimension], dtype=torch.int64, device=device)
    first = _mix((sample + keys[0]) & _32_BITS)
    second = _mix((first + keys[1]) & _32_BITS)
    others = [dimension for dimension in range(len(shape)) if dimension != sample_dimension]
    position = torch.zeros(1, dtype=torch.int64, device=device)
    for dimension in others:
        index = torch.arange(*block[dimension], dtype=torch.int64, device=device)
        position = (position.unsqueeze(-1) * shape[dimension] + index).flatten()
    kept = torch.empty((len(sample), len(position)), dtype=torch.bool, device=device)
    limit = round((1 - probability) * (1 << 32))
    some = max(1, _AT_ONCE // max(1, len(position)))
    for start in range(0, len(sample), some):
        here = slice(start, start + some)
        numbers = _mix(position ^ first[here, None])
        numbers = _mix(numbers.add_(second[here, None]).bitwise_and_(_32_BITS))
        torch.lt(numbers, limit, out=kept[here])
    lengths = [block[dimension][1] - block[dimension][0] for dimension in others]
    return kept.reshape(len(sample), *lengths).movedim(0, sample_dimension)


def _mix(numbers: Tensor) -> Tensor:
    """Another 32-bit number for each; in place."""
    numbers.bitwise_xor_(numbers >> 16)
    numbers.mul_(_MULTIPLIERS[0]).bitwise_and_(_32_BITS)
    numbers.bitwise_xor_(numbers >> 15)
    numbers.mul_(_MULTIPLIERS[1]).bitwise_and_(_32_BITS)
    numbers.bitwise_xor_(numbers >> 15)
    return numbers
