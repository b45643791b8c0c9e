"""A comparison in double precision, also of models that go to a lower one within their forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOWER = (torch.float16, torch.bfloat16)
_CASTS = (Tensor.half, Tensor.bfloat16)


@contextmanager
def staying_in(dtype: torch.dtype) -> Iterator[None]:
    """Within, in a comparison in double precision, casts to float16 and bfloat16 are to double, and no autocast takes effect.

    Otherwise the rounding of a forward that uses them would hide differences, or look like one: sums in another order are rounded
    to other numbers."""
    with _InDouble() if dtype is torch.float64 else nullcontext():
        yield


class _InDouble(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _CASTS:
            func = Tensor.double
        given = [_raised(each) for each in args] if torch.dtype in map(type, args) else args
        named = {name: _raised(each) for name, each in kwargs.items()} if kwargs else {}
        if not torch._C._is_any_autocast_enabled():
            return func(*given, **named)
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return func(*given, **named)
        return func(*given, **named)


def _raised(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _LOWER else argument
