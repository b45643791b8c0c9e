"""Rounding in another order passes, a wrong term does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.precision import close


def products(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A product, and the terms of which it is the sum."""
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 300), (300, 20)))
    return one @ other, one.T[:, :, None] * other[:, None, :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_another_order(dtype: torch.dtype) -> None:
    plain, terms = products(dtype)
    exact = terms.double().sum(0)
    backwards = torch.zeros_like(plain)
    for term in reversed(terms):
        backwards += term
    close(backwards, plain, exact=exact)
    for found in (terms[:-1].sum(0), backwards * (1 + 1e-4)):
        with pytest.raises(AssertionError, match="result: off by"):
            close(found, plain, exact=exact)


def test_single_precision_needs_a_judge_of_the_same() -> None:
    plain, terms = products()
    with pytest.raises(AssertionError, match="judged by float64"):
        close(plain, plain)
    with pytest.raises(AssertionError, match="float64 computes something else"):
        close(plain, plain, exact=terms.double().sum(0) * 1.01)


def test_whole_numbers_are_equal() -> None:
    close(torch.arange(3), torch.arange(3))
    with pytest.raises(AssertionError, match="numbers"):
        close(torch.arange(3), torch.arange(1, 4), "numbers")
