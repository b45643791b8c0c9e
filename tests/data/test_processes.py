"""Loader processes: the same batches as the thread's, whatever becomes of them is said, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from tests.patience import PATIENCE_S
from zmqtrain.data.background import BackgroundThread
from zmqtrain.data.loader import Fetch, Loader, Reader
from zmqtrain.data.partition import Partition
from zmqtrain.data.processes import LONGEST_FOLDER, LoaderProcesses, LoaderTraceback, Processes, Request
from zmqtrain.errors import TaskError


class Noisy:
    """Draws from everything there is."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2) + torch.empty(2).uniform_() + torch.randn(2) + random.random() + float(np.random.rand())
        noise += torch.rand_like(noise) + torch.randint_like(noise, 3, high=9)
        return noise + torch.randint(5, (1,)) + torch.randperm(2), index


class Bad:
    """What goes wrong depends on the sample."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise OSError("disk on fire")
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 3:
            os._exit(5)
        return torch.zeros(1), index


def loader_of(data: Any, workers: int, partition: Partition, **fields: Any) -> Loader:
    processes = Processes(num_workers=workers, **fields) if workers else None
    reader = data if isinstance(data, Reader) else Reader(data)
    indices = lambda step: partition.indices(step, 0, 0)  # noqa: E731
    return Loader(Fetch(reader), indices, (1,), processes=processes, epoch_steps=partition.steps_per_epoch)


def loaders() -> set[psutil.Process]:
    """Not the two that Python keeps for all it spawns, nor any that ends while it is looked at."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())  # a zombie has none
            if command and not any(word in command for word in ("resource_tracker", "forkserver")):
                found.add(process)
    return found


@pytest.fixture(autouse=True)
def before() -> Iterator[set[psutil.Process]]:
    """The processes of other tests in this process. None is left of a test here."""
    others = loaders()
    yield others
    _, alive = psutil.wait_procs(loaders() - others, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
async def test_batches_are_those_of_the_thread(workers: int, persistent: bool) -> None:
    partition = Partition(23, 1, 1, 5, seed=4)
    found = []
    before = torch.get_rng_state()
    for count in (0, workers):
        loader = loader_of(Noisy(), count, partition, **({"persistent_workers": persistent} if count else {}))
        batches = [await loader.batch(step) for step in range(10)]  # two and a half epochs
        batches.append(await loader.batch(4))  # a jump back, as after a checkpoint
        batches.append(await loader.batch(5, ahead=False))
        await loader.close(20)
        found.append([(batch.inputs[0], batch.target) for batch in batches])
    for (ours, target), (theirs, their_target) in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(target, their_target)
    assert not torch.equal(found[0][0][0], found[0][4][0])
    assert torch.equal(torch.get_rng_state(), before)  # the model's numbers are the model's


async def test_other_samples_of_steps_that_were_read_ahead_are_read_again() -> None:
    of = {step: np.arange(4) + step for step in range(20)}
    reader = Reader([(torch.zeros(1), index) for index in range(40)])
    loader = Loader(Fetch(reader), of.__getitem__, (1,), processes=Processes(num_workers=1, prefetch_factor=4))
    assert (await loader.batch(0)).target.tolist() == [0, 1, 2, 3]
    of |= {step: np.arange(2) for step in range(2, 20)}  # as when workers share a batch anew
    assert [len((await loader.batch(step)).target) for step in range(1, 6)] == [4, 2, 2, 2, 2]
    await loader.close(20)


async def test_what_a_dataset_raises_names_the_samples_and_shows_its_traceback() -> None:
    loader = Loader(Fetch(Reader(Bad())), lambda step: np.array([0, 1]), (1,), processes=Processes(num_workers=1))
    with pytest.raises(TaskError, match=r"samples \[0, 1\] raised OSError: disk on fire") as caught:
        await loader.batch(0)
    assert isinstance(caught.value.__cause__, LoaderTraceback)
    assert 'raise OSError("disk on fire")' in caught.value.__cause__.trace
    await loader.close(20)


@pytest.mark.parametrize(("first", "said"), [(2, "SIGKILL"), (3, "exit code 5")])
async def test_a_process_that_dies(first: int, said: str) -> None:
    reader = Reader(Bad())
    loader = Loader(Fetch(reader), lambda step: np.array([first]), (1,), processes=Processes(num_workers=2))
    with pytest.raises(TaskError, match=rf"has died or does not answer .*{said}"):
        await loader.batch(0)
    await loader.close(20)


async def test_what_cannot_be_sent_is_an_error_and_no_long_wait() -> None:
    reader = Reader([1, 2, 3], collate=lambda samples: (torch.zeros(len(samples)), threading.Lock()))
    loader = Loader(Fetch(reader), lambda step: np.array([0, 1]), (1,), processes=Processes(num_workers=1))
    with pytest.raises(TaskError, match="a batch holds a lock, which a loader process cannot send"):
        await loader.batch(0)
    await loader.close(20)


@pytest.mark.filterwarnings("ignore:Got pickle error")
async def test_a_dataset_that_cannot_be_pickled_needs_fork() -> None:
    data = [(torch.zeros(1), lambda: 1)]
    processes = Processes(num_workers=1, multiprocessing_context="spawn")
    loader = Loader(Fetch(Reader(data)), lambda step: np.array([0]), (1,), processes=processes)
    with pytest.raises(TaskError, match=r"cannot be sent to a loader process .*leave multiprocessing_context at its default"):
        await loader.batch(0)
    await loader.close(20)


async def test_processes_that_are_no_forks() -> None:
    data = [(torch.full((1,), float(index)), index) for index in range(23)]
    loader = loader_of(data, 1, Partition(23, 1, 1, 5, seed=1, shuffle="none"), multiprocessing_context="spawn")
    assert (await loader.batch(0)).target.tolist() == [0, 1, 2, 3, 4]
    assert (await loader.batch(1, ahead=False)).inputs[0].flatten().tolist() == [5, 6, 7, 8, 9]
    await loader.close(20)


class Opened:
    """Is made ready in each process, by the person's ``worker_init_fn``."""

    opened = ""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return self.opened, index


def open_it(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == number
    assert isinstance(info.dataset, Opened)
    info.dataset.opened = f"by {number}"


async def test_the_person_s_init_has_the_person_s_dataset() -> None:
    loader = loader_of(Opened(), 2, Partition(23, 1, 1, 2, seed=1), worker_init_fn=open_it)
    assert [(await loader.batch(step)).inputs[0] for step in range(4)] == [("by 0",) * 2, ("by 1",) * 2] * 2
    await loader.close(20)


async def test_a_signal_to_a_loader_process_is_not_taken_for_one_to_the_worker(before: set[psutil.Process]) -> None:
    heard: list[str] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: heard.append("SIGTERM"))
    try:
        loader = loader_of(Noisy(), 1, Partition(23, 1, 1, 2, seed=1))
        await loader.batch(0)
        (process,) = loaders() - before
        process.terminate()
        with pytest.raises(TaskError, match="has died"):
            await _all(loader, 20)
        assert not heard
        await loader.close(20)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def _all(loader: Loader, steps: int) -> None:
    for step in range(1, steps):
        await loader.batch(step)


@pytest.mark.parametrize("length", [LONGEST_FOLDER, LONGEST_FOLDER + 1, 150])
async def test_temporary_folders_with_long_paths(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are handed over by Unix sockets there, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="z", dir="/tmp") as short:
        folder = f"{short}/{'x' * (length - len(short) - 1)}"
        os.mkdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        loader = loader_of(Noisy(), 1, Partition(23, 1, 1, 4, seed=4))
        assert (await loader.batch(0, ahead=False)).samples == 4
        await loader.close(20)


async def test_processes_that_begin_while_others_seed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeding takes a lock of torch's, which a process that is forked meanwhile would find taken for ever."""
    monkeypatch.setattr(torch, "manual_seed", torch.random.manual_seed)  # the one of tests takes no lock (tests/whole_process.py)
    through = threading.Event()

    def seed() -> None:
        while not through.is_set():
            torch.manual_seed(0)

    threads = [threading.Thread(target=seed) for _ in range(2)]
    state = torch.get_rng_state()
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):  # nearly each of them waits for ever without the locks
            loader = loader_of([(torch.zeros(1), 0)] * 23, 1, Partition(23, 1, 1, 4, seed=4))
            assert (await loader.batch(0, ahead=False)).samples == 4
            await loader.close(20)
    finally:
        through.set()
        for thread in threads:
            thread.join()
        torch.set_rng_state(state)


class Drawing:
    """Other threads that hold the lock of torch's random numbers while they draw so many, again and again, as dropouts do.

    There are two, so that one has it while the other begins anew."""

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers

    def __enter__(self) -> None:
        self._through = threading.Event()
        self._threads = [threading.Thread(target=self._draw) for _ in range(2)]
        self._drawing = threading.Event()
        self._state = torch.get_rng_state()
        for thread in self._threads:
            thread.start()
        self._drawing.wait()

    def _draw(self) -> None:
        much = torch.empty(self._numbers, dtype=torch.uint8)
        while not self._through.is_set():
            self._drawing.set()
            much.random_()

    def __exit__(self, *_: object) -> None:
        self._through.set()
        for thread in self._threads:
            thread.join()
        torch.set_rng_state(self._state)


@pytest.mark.parametrize("persistent", [False, True])
async def test_processes_begin_while_nothing_is_computed(persistent: bool) -> None:
    """A dropout draws in each step, and new epochs begin meanwhile."""
    partition = Partition(23, 1, 1, 10, seed=4)
    loader = loader_of([(torch.zeros(1), 0)] * 23, 2, partition, persistent_workers=persistent)
    for step in range(7):
        assert (await loader.batch(step, ahead=step < 6)).samples == 10
        with Drawing(1 << 23):
            await asyncio.sleep(0.05)  # for what is fetched ahead
    await loader.close(20)


async def test_processes_that_find_a_lock_taken_are_not_waited_for_for_ever() -> None:
    reader = Reader([(torch.zeros(1), 0)] * 23)
    indices = np.arange(4)
    loader = LoaderProcesses(reader, lambda step: Request(step, indices, (1,)), Processes(num_workers=2), begin_s=0.1)
    thread = BackgroundThread("loader")
    with Drawing(1 << 27), pytest.raises(TaskError, match=r"[12] of the 2 loader processes .* did not start .*held a lock"):
        await thread.submit(lambda: loader.take(Request(0, indices, (1,))))
    loader._begin_s = 60.0  # on a busy machine a process may need more than half a second
    found = await thread.submit(lambda: loader.take(Request(0, indices, (1,))))  # by others
    assert len(found[0]) == 4
    await thread.submit(loader.renew)
    await thread.close(20)
