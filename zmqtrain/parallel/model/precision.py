"""In which precision divided layers compute: as the plain ones do under `torch.autocast`."""

from __future__ import annotations

import torch
from torch import Tensor


def lowered(tensor: Tensor) -> Tensor:
    """In autocast's precision, where a product is to be computed in that, and what is sent is smaller; with its gradient."""
    device = tensor.device.type
    if tensor.is_meta or not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def raised(tensor: Tensor) -> Tensor:
    """In at least float32, as statistics and logarithms need it; with its gradient."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
