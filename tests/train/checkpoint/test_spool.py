"""Tensors in a file until they are sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zmqtrain.train.checkpoint.spool import Spool

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3).t(),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "marks": torch.tensor([True, False]),
    "half": torch.randn(5).half(),
}


def test_tensors_come_back_as_often_as_they_are_asked_for() -> None:
    spool = Spool(iter(TENSORS.items()))
    assert list(spool) == list(TENSORS)
    for _ in range(2):
        for name, tensor in TENSORS.items():
            found = spool[name]
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    with pytest.raises(KeyError):
        spool["other"]


def test_tensors_are_taken_one_by_one() -> None:
    taken: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            yield str(number), torch.full((2,), number)
            taken.append(number)

    assert [int(each[0]) for each in Spool(tensors()).values()] == taken == [0, 1, 2]
