"""What may be given as data, what of a DataLoader counts, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from zmqtrain.data.partition import Partition
from zmqtrain.data.source import SampledOrder, Source, source_of
from zmqtrain.data.state import pack_state, unpack_state
from zmqtrain.errors import CheckpointError, TaskError, UsageError

DATA = TensorDataset(torch.arange(20.0), torch.arange(20))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


class OsRandom:
    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(20), 20))


class Steady:
    """Its own generator, the same each time by ``set_epoch``."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(20), 20))


def of(data: Any, **fields: Any) -> Source:
    return source_of("the data", data, **fields)


def test_what_of_a_loader_counts() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    def init(number: int) -> None:
        return None

    loader = DataLoader(
        DATA, batch_size=5, shuffle=True, collate_fn=collate, num_workers=2, prefetch_factor=3, persistent_workers=True,
        worker_init_fn=init, multiprocessing_context="fork", timeout=7.0, pin_memory=True, drop_last=True,
    )  # fmt: skip
    source = of(loader)
    assert (source.dataset, source.collate, source.batch_size, source.order, source.pin) == (DATA, collate, 5, "shuffled", True)
    how = source.processes
    assert how is not None
    assert (how.num_workers, how.prefetch_factor, how.persistent_workers, how.worker_init_fn, how.timeout) == (
        2,
        3,
        True,
        init,
        7.0,
    )
    assert how.multiprocessing_context.get_start_method() == "fork"
    plain = of(DataLoader(DATA, batch_size=5))
    assert (plain.collate, plain.processes, plain.order) == (None, None, "sequential")
    given = of(DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=False)))
    assert (given.batch_size, given.order) == (4, "sequential")
    assert of(DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5))).order == "sampler"


@pytest.mark.parametrize("sampler", [SequentialSampler(range(6)), RandomSampler(range(6)), RandomSampler(range(6), num_samples=20)])
def test_a_sampler_of_fewer_samples_than_the_dataset_is_no_order_of_the_whole(sampler: Any) -> None:
    given = of(DataLoader(DATA, sampler=sampler))
    order = given.order_of(1)
    assert order is not None
    assert set(order(0).tolist()) == set(range(6))
    assert order.samples == len(sampler)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None"),
        (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), "the batch sampler list"),
        (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), "DistributedSampler"),
        (lambda: DataLoader(DATA, in_order=False), "in_order=False"),
        (lambda: OwnLoader(DATA), "a OwnLoader with its own way to iterate"),
        (lambda: DataLoader(Numbers(), num_workers=2), "each process would read all of it"),
        (lambda: DataLoader([]), "is empty"),
        (lambda: {"train": [1], "test": [2]}, "pass one of them, such as data.'train'."),
        (lambda: {0: [1], 1: [2]}, r"pass a list, such as list\(data.values\(\)\)"),
        (lambda: "data.csv", "is a string"),
        (lambda: 7, "an int; it must be a map-style dataset"),
    ],
)
def test_what_is_refused(make: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        of(make())


def test_settings_stand_in_one_place() -> None:
    with pytest.raises(TaskError, match="has its own collate"):
        of(DataLoader(DATA), collate=list)


@pytest.mark.parametrize(
    ("loader", "batch", "shuffle", "said"),
    [
        ({"batch_size": 5}, 6, "global", r"batch_size = 5, but a group takes 6"),
        ({"batch_size": 5, "shuffle": True}, 5, "none", "a DataLoader that shuffles"),
        ({"batch_size": 5}, 5, "ring", "determines the order of samples"),
    ],
)
def test_a_loader_that_the_topology_contradicts(loader: Any, batch: int, shuffle: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        of(DataLoader(DATA, **loader)).require(batch, shuffle)
    of(DataLoader(DATA, batch_size=5)).require(5, "global")


def test_a_sampler_s_order_follows_from_the_seed_alone() -> None:
    def sampler() -> Any:
        return WeightedRandomSampler(torch.arange(1.0, 21.0), 20, generator=torch.Generator().manual_seed(random.getrandbits(30)))

    first, second = SampledOrder("it", sampler(), 1), SampledOrder("it", sampler(), 1)
    second(5)  # in another order, as a resumed run asks
    for epoch in (0, 1, 5):
        assert first(epoch).tolist() == second(epoch).tolist()
    assert first(0).tolist() != first(1).tolist()
    assert first(0).tolist() != SampledOrder("it", sampler(), 2)(0).tolist()
    steady = SampledOrder("it", Steady(), 1)
    assert sorted(steady(3)) == list(range(20))
    partition = Partition(steady.samples, 2, 1, 5, seed=1, order=steady)
    assert [*partition.run(2, 0, 5), *partition.run(2, 5, 10)] == steady(1)[:10].tolist()


def test_a_sampler_that_no_two_workers_would_have_alike_is_refused() -> None:
    with pytest.raises(TaskError, match="gives a different order each time"):
        SampledOrder("it", OsRandom(), 1)
    with pytest.raises(TaskError, match="must give whole numbers"):
        SampledOrder("it", ["a"], 1)


@pytest.mark.parametrize(
    "state",
    [None, {"a": [1, 2.5, "x", b"y", (1, (2,))], 3: {"deep": True}}, 1 << 200, {"rng": random.Random(1).getstate()}],
)
def test_states_of_streams_come_back(state: Any) -> None:
    packed = pack_state(state)
    assert packed is not None
    assert unpack_state(packed) == state


def test_states_that_are_not_kept() -> None:
    assert pack_state({"open file": object()}) is None
    assert pack_state(b"x" * (17 << 20)) is None
    for wrong in (b"", b"\xc1", 7, b"\xc7\x01\x02x", b"\xc7\x03\x02\x93\x01\x02\x03"):
        with pytest.raises(CheckpointError):
            unpack_state(wrong)
