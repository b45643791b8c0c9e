"""How far results in single precision may be apart: sums in another order round otherwise, and every processor in its own way.

No fixed number of digits is right on all of them. The judge is the same arithmetic in double precision: a result may be so many
times as far from it as one process's own result in single precision is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

#: How many times as far as one process. A wrong term in a sum is off by thousands of times.
TIMES = 16.0
#: Roundings that any result may have had, also where one process happened to meet the exact number.
ROUNDINGS = 4.0
#: Farther from float64 than this no layer or short training is by rounding: the judge would judge something else.
PLAIN = 1e-3
#: Of results in double precision, which are exact here.
EXACT = 1e-10


def close(found: Tensor, plain: Tensor, what: str = "result", *, exact: Tensor | None = None, least: float = 1e-30) -> None:
    """``found`` is what ``plain``, one process's result, is but for rounding, relative to the largest number or to ``least``.

    ``exact`` is the same in float64; it must be given where ``plain`` is of another floating type.
    """
    assert found.shape == plain.shape, (what, found.shape, plain.shape)
    if plain.numel() == 0 or not plain.is_floating_point():
        assert torch.equal(found, plain), what
        return
    assert exact is not None or plain.dtype == torch.float64, f"{what}: {plain.dtype} is judged by float64"
    judge = plain if exact is None else exact
    assert judge.dtype == torch.float64
    scale = max(float(judge.abs().max()), least)
    error, own = (float((each.double() - judge).abs().max()) / scale for each in (found, plain))
    assert own <= PLAIN, f"{what}: float64 computes something else than one process in {plain.dtype} does, off by {own:.2e}"
    allowed = EXACT if plain.dtype == torch.float64 else TIMES * max(own, ROUNDINGS * torch.finfo(plain.dtype).eps)
    assert error <= allowed, f"{what}: off by {error:.2e}, where one process is off by {own:.2e}"


def judge_of(module: nn.Module) -> nn.Module:
    """The same layer in float64."""
    return copy.deepcopy(module).double()


def exactly(value: Any) -> Any:
    """Numbers in float64, and anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
