"""Sums of several processes' buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zmqtrain.host import sums
from zmqtrain.host.sums import sum_into


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCK", 7)


def sources(count: int, numel: int = 50, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [(10 * torch.randn(numel, generator=generator)).to(dtype) for _ in range(count)]


def in_order(given: list[Tensor], scale: float = 1.0) -> Tensor:
    result = given[0].clone()
    for each in given[1:]:
        result = result + each
    return result * scale if scale != 1.0 else result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_sum_is_in_order_whoever_receives_it(count: int, dtype: torch.dtype) -> None:
    given = sources(count, dtype=dtype)
    expected = in_order(given)
    elsewhere = torch.empty_like(expected)
    sum_into([elsewhere], given)
    assert torch.equal(elsewhere, expected)
    first, last = [each.clone() for each in given], [each.clone() for each in given]
    sum_into(first[:1], first)
    assert torch.equal(first[0], expected)
    assert all(torch.equal(left, right) for left, right in zip(first[1:], given[1:], strict=True))
    sum_into(last[-1:], last)
    assert torch.equal(last[-1], expected)
    second = [each.clone() for each in given]
    sum_into(second[1:2], second)
    assert all(torch.equal(each, expected) for each in second[1:2])
    sum_into(given, given)
    assert all(torch.equal(each, expected) for each in given)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sums_are_scaled(count: int) -> None:
    given = sources(count)
    expected = in_order(given, 0.25)
    sum_into(given[:1], given, scale=0.25)
    assert torch.equal(given[0], expected)


def test_other_operations_combine_alike() -> None:
    given = sources(4)
    expected = torch.stack(given).amax(0)
    sum_into(given, given, combine=torch.maximum)
    assert all(torch.equal(each, expected) for each in given)


def test_nothing_is_nothing() -> None:
    sum_into([torch.empty(0)], [torch.empty(0)] * 3)
