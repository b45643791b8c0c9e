"""How far two computations of the same may be apart: by rounding, and by what rounding does to this model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

#: Of a tensor's largest element: sums in another order come nowhere near it.
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}
#: Of the largest element of all gradients: some are nothing but rounding, as those of a bias before batch norm.
FLOOR = {torch.float64: 1e-13, torch.float32: 1e-7}
#: By so much more than the ordinary model changes by itself where its weights and inputs change by a ten-millionth.
TIMES_OWN_CHANGE = 30.0


class Tolerance:
    """What is allowed. The model's own change is found out only where it is asked for, since it takes two more steps."""

    def __init__(self, dtype: torch.dtype, own_change: Callable[[], Mapping[Any, float]]) -> None:
        self._dtype, self._find = dtype, own_change
        self._own: Mapping[Any, float] | None = None

    def allows(self, what: str, name: str, by: float, of: float, *, floor: float = 0.0) -> bool:
        """Whether a difference ``by`` is rounding, where the largest element is ``of``."""
        if by <= RELATIVE[self._dtype] * of + FLOOR[self._dtype] * floor:
            return True
        if by == float("inf"):
            return False
        if self._own is None:
            self._own = self._find()
        return by <= TIMES_OWN_CHANGE * self._own.get((what, name), 0.0)


def largest(tensor: Tensor) -> float:
    """The largest element's absolute value, of those that are finite."""
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if tensor.is_floating_point() and (found := float(torch.linalg.vector_norm(tensor, float("inf")))) < float("inf"):
        return found
    values = tensor.abs().to(torch.float64)
    return float(values.nan_to_num(0.0, 0.0, 0.0).max())
