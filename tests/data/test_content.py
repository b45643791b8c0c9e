"""Data in memory shows what is in it, without being read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from zmqtrain.data.content import attributes_of, content_of

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
    "a list of numpy's numbers": lambda x, y: list(y.numpy()),
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


class Own:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_what_a_dataset_keeps_is_said_by_attributes() -> None:
    x, order = X.numpy(), ORDER.numpy()
    own = Own(images=x, order=list(order), files=[Path("/a/1.png"), "/a/2.png"], pairs=[("/a/1.png", 3)], rate=0.3, empty=[])
    found = attributes_of(own)
    assert list(found) == ["files", "images", "order", "pairs"]
    assert found == attributes_of(Own(images=x, order=tuple(order), files=["/b/1.png", "/b/2.png"], pairs=[["/b/1.png", 3]]))
    other = attributes_of(Own(images=x[::-1], order=order[::-1].tolist(), files=["/a/2.png", "/a/1.png"], pairs=[("/a/1.png", 4)]))
    assert [name for name in found if found[name] == other[name]] == []


def test_attributes_that_may_be_others_in_each_process_are_not_said() -> None:
    assert attributes_of(Own(parts=[{"cache": "0f3a.arrow"}], things=[object()], lock=object(), scalar=np.array(3))) == {}
    assert attributes_of(TensorDataset(X)) == attributes_of([1, 2]) == attributes_of(X) == {}


def test_attributes_of_what_a_dataset_reads_from() -> None:
    class Wrapped(Dataset[Any]):
        def __init__(self, base: Any) -> None:
            self.base, self.order = base, [2, 1]

    assert list(attributes_of(Subset(Wrapped(Wrapped(TensorDataset(X))), [1]))) == ["dataset.base.order", "dataset.order"]
