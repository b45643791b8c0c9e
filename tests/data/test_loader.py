"""Batches: fetched ahead, whole where they can be, and what is wrong with a dataset is said."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from zmqtrain.data.batch import Batch
from zmqtrain.data.loader import Fetch, Finish, Loader, Reader
from zmqtrain.data.partition import Partition
from zmqtrain.errors import TaskError

TENSORS = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


class Pairs:
    """A map-style dataset that remembers in which thread it was read."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name)
        self.read.append(index)
        if index == 13:
            raise OSError("disk on fire")
        return {"x": torch.full((2,), float(index))}, index


def test_a_tensor_dataset_gives_what_single_samples_give() -> None:
    indices = np.array([3, 0, 7])
    whole = Fetch(Reader(TENSORS))(indices)
    single = Fetch(Reader([TENSORS[i] for i in range(20)]))(indices)
    assert torch.equal(whole.inputs[0], single.inputs[0])
    assert torch.equal(whole.target, single.target)
    assert whole.samples == 3


def test_collate_and_transform_are_used() -> None:
    fetch = Fetch(
        Reader(
            Pairs(),
            collate=lambda samples: (torch.stack([x["x"] for x, _ in samples]), torch.tensor([y for _, y in samples])),
            transform=lambda batch: (batch[0] + 1, batch[1]),
        )
    )
    batch = fetch(np.array([1, 2]))
    assert batch.inputs[0].tolist() == [[2.0, 2.0], [3.0, 3.0]]


def test_augmentation_by_python_numpy_and_torch_is_repeatable() -> None:
    fetch = Fetch(
        Reader(TENSORS, transform=lambda batch: (batch[0] * random.random() + np.random.rand() + torch.rand(()), batch[1]))
    )
    first, other, again = (fetch(np.array([1, 2]), (1, 0, step)).inputs[0] for step in (4, 5, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_micro_batches_are_all_of_the_batch(parts: int) -> None:
    batch = Batch(({"x": torch.arange(14).reshape(7, 2)}, "label"), torch.arange(7), 7)
    split = batch.split(parts)
    assert len(split) == min(parts, 7)
    assert torch.equal(torch.cat([part.inputs[0]["x"] for part in split]), batch.inputs[0]["x"])
    assert torch.equal(torch.cat([part.target for part in split]), batch.target)
    assert sum(part.samples for part in split) == 7


async def test_the_next_batch_is_fetched_while_this_one_is_used() -> None:
    dataset = Pairs()
    partition = Partition(13, 1, 1, 3, seed=1, shuffle="none")
    loader = Loader(Fetch(Reader(dataset)), lambda step: partition.indices(step, 0, 0), (1,))
    first = await loader.batch(0)
    assert first.target.tolist() == [0, 1, 2]
    await asyncio.wait_for(_until(lambda: len(dataset.read) == 6), 5)
    assert (await loader.batch(1)).target.tolist() == [3, 4, 5]
    assert (await loader.batch(3, ahead=False)).target.tolist() == [9, 10, 11]  # a jump: what was fetched ahead is dropped
    assert dataset.threads == {"zmqtrain-loader"}
    await loader.close(5)


async def test_the_next_batch_is_on_its_way_to_the_device_while_this_one_is_used() -> None:
    begun: list[Any] = []

    def move(source: torch.Tensor) -> Any:
        begun.append(source.tolist())
        return lambda: source + 100

    partition = Partition(12, 1, 1, 3, seed=1, shuffle="none")
    loader = Loader(Fetch(Reader(Pairs()), Finish(move=move)), lambda step: partition.indices(step, 0, 0), (1,))
    first = await loader.batch(0)
    await asyncio.wait_for(_until(lambda: len(begun) == 4), 5)
    assert begun[3] == [3, 4, 5]
    there = first.to(torch.device("cpu"))
    assert (there.inputs[0]["x"][:, 0].tolist(), there.target.tolist()) == ([100, 101, 102], [100, 101, 102])
    assert (there.samples, first.target.tolist()) == (3, [0, 1, 2])
    assert [part.target.tolist() for part in there.split(2)] == [[100, 101], [102]]
    assert (await loader.batch(1, ahead=False)).to(torch.device("cpu")).target.tolist() == [103, 104, 105]
    await loader.close(5)


async def _until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_what_a_dataset_raises_names_the_samples() -> None:
    loader = Loader(Fetch(Reader(Pairs())), lambda step: np.array([12, 13]), (1,))
    with pytest.raises(TaskError, match=r"samples \[12, 13\] raised OSError: disk on fire") as caught:
        await loader.batch(0)
    assert isinstance(caught.value.__cause__, OSError)
    await loader.close(5)


def test_samples_that_are_no_pairs_are_an_error() -> None:
    with pytest.raises(TaskError, match=r"must be \(input, target\)"):
        Fetch(Reader([1, 2, 3]))(np.array([0, 1]))
