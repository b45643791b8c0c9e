"""How far two computations of the same may be apart: by rounding, and by what rounding does to this model."""

from __future__ import annotations

import torch
from torch import Tensor

#: Of a tensor's largest element: sums in another order come nowhere near it.
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}
#: Of the largest element of all gradients: some are nothing but rounding, as those of a bias before batch norm.
FLOOR = {torch.float64: 1e-13, torch.float32: 1e-7}
#: By so much more than the ordinary model changes by itself where its weights and inputs change by a ten-millionth.
TIMES_OWN_CHANGE = 30.0


def is_rounding(dtype: torch.dtype, by: float, of: float, *, floor: float = 0.0) -> bool:
    """Whether a difference ``by`` is surely rounding, where the largest element is ``of``, and that of all gradients ``floor``."""
    return by <= RELATIVE[dtype] * of + FLOOR[dtype] * floor


def largest(tensor: Tensor) -> float:
    """The largest element's absolute value, of those that are finite."""
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach()
    if tensor.is_floating_point() and (found := float(torch.linalg.vector_norm(tensor, float("inf")))) < float("inf"):
        return found
    values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64).abs()
    return float(values.nan_to_num(0.0, 0.0, 0.0).max())


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of an element; infinite where they cannot be compared. What is NaN in both is alike."""
    one, other = one.detach(), other.detach().to(one.device)
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    apart = float(torch.linalg.vector_norm(one - other, float("inf")))
    if apart < float("inf"):
        return apart
    difference = torch.where(one == other, 0, one - other).abs().to(torch.float64)
    difference = torch.where(one.isnan() & other.isnan(), 0.0, difference)
    by = float(difference.max())
    return by if by == by else float("inf")
