"""Decisions that need the norm of a whole gradient, while its buckets are exchanged one by one: to clip it, or to skip the
update."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import torch

from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


class GroupClip:
    """Collects one step's sum of squares on one worker, and then has the factor by which to scale. Made on the loop's thread."""

    __slots__ = ("_clip_norm", "_judges", "_missing", "_total", "factor", "nothing", "squares")

    def __init__(self, buckets: int, clip_norm: float, *, judges: bool = False) -> None:
        """``clip_norm``: 0 for no clipping. ``judges``: discard a gradient that is not finite; otherwise it stays as it is."""
        self._judges = judges
        self._missing = buckets
        self.nothing = False
        """Whether the whole gradient is not finite and must not be used. Known once `factor` is."""
        self._clip_norm = clip_norm
        self._total = np.zeros(1)
        #: To be summed over the group once `add` has returned True; float64, so that the division into buckets hardly matters.
        self.squares = TensorPayload.of(self._total)
        self.factor: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def add(self, squares: float) -> bool:
        """Add one bucket's sum of squares. Returns whether it was the last bucket."""
        self._total[0] += squares
        self._missing -= 1
        return self._missing == 0

    def decide(self) -> bool:
        """Called when `squares` holds the whole sum. Returns whether it is finite."""
        total = float(self._total[0])
        if self._judges and not math.isfinite(total):
            self.nothing = True
            self.factor.set_result(0.0)
            return False
        # Like torch.nn.utils.clip_grad_norm_.
        self.factor.set_result(min(1.0, self._clip_norm / (math.sqrt(total) + 1e-6)) if self._clip_norm else 1.0)
        return True


def square(payload: Payload) -> float:
    """The sum of the squares of the elements; 0 for payloads without elements in memory."""
    if not isinstance(payload, TensorPayload):
        return 0.0
    return squares_of(payload.tensor)


def norm_of(tensor: torch.Tensor) -> float:
    """The norm of the elements in single precision at least: a quarter of the work of double precision, which is taken only where
    their squares are too large."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    norm = float(torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32)))
    return norm if math.isfinite(norm) else math.sqrt(squares_of(tensor))


def squares_of(tensor: torch.Tensor) -> float:
    """The sum of the squares of the elements (of complex ones: of their absolute values), in double precision."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(real, dtype=torch.float64)) ** 2
