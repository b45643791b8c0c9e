"""Data in memory shows what is in it, without being read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from zmqtrain.data.content import content_of

X = torch.randn(5000, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(5000)
ORDER = torch.randperm(5000, generator=torch.Generator().manual_seed(2))

KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tensors": TensorDataset,
    "a subset": lambda x, y: Subset(TensorDataset(X, Y), y.tolist()),
    "several": lambda x, y: ConcatDataset([TensorDataset(X), TensorDataset(x)]),
    "a list": lambda x, y: [(each, int(number)) for each, number in zip(x, y, strict=True)],
    "a list of mappings": lambda x, y: [
        {"text": f"word {number}", "array": each.numpy()} for each, number in zip(x, y, strict=True)
    ],
    "an array": lambda x, y: x.numpy(),
    "columns": lambda x, y: TensorDataset(x.t().contiguous().t()),
    "bfloat16": lambda x, y: TensorDataset(x.bfloat16(), y > 7),
    "complex": lambda x, y: TensorDataset(torch.complex(x, x), y),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_another_content_and_the_same_is_the_same(kind: str) -> None:
    make = KINDS[kind]
    assert content_of(make(X, Y)) == content_of(make(X.clone(), Y.clone())) != []
    assert content_of(make(X[ORDER], Y[ORDER])) != content_of(make(X, Y))


def test_one_number_is_data_too() -> None:
    assert content_of([torch.tensor(3.0)]) != content_of([torch.tensor(4.0)])
    assert content_of(TensorDataset(torch.zeros(0, 3))) == content_of(TensorDataset(torch.zeros(0, 3)))
    assert content_of([object()]) == content_of([object()])
    assert content_of(np.array([object()])) == content_of(np.array([object()]))
    assert content_of([]) == content_of(())


def test_nothing_is_read() -> None:
    class Files(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            raise AssertionError

    assert content_of(Files()) == []
