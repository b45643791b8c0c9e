"""Copies between the device's memory and the host's: late, in order, and beside the arithmetic."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from zmqtrain.train.device.accelerator import accelerator_of
from zmqtrain.train.device.streams import StreamStaging
from zmqtrain.train.shared import allocate_privately

NUMEL, PATIENCE_S = 100_000, 20.0


@pytest.fixture
def staging(device: torch.device) -> Iterator[StreamStaging]:
    accelerator = accelerator_of(device)
    assert accelerator is not None
    made = StreamStaging(accelerator, device)
    yield made
    made.close()


def test_there_and_back(staging: StreamStaging, device: torch.device) -> None:
    """Each copy's end is told once, in order, and the content is there when it is."""
    host, back = (allocate_privately(NUMEL, torch.float32) for _ in range(2))
    for each in (host, back):
        staging.pin(each)
        staging.pin(each)  # twice is once
        assert each.is_pinned()
    for round_ in range(5):
        told: queue.SimpleQueue[float] = queue.SimpleQueue()
        host.fill_(float(round_))
        there = torch.zeros(NUMEL, device=device)
        arrive = staging.to_device(host, there, lambda: None)
        arrive()
        there.mul_(2.0)  # queued behind the copy
        wait = staging.to_host(there, back, lambda told=told: told.put(float(back.sum())))
        wait()
        assert back.tolist() == [2.0 * round_] * NUMEL
        assert told.get(timeout=PATIENCE_S) == 2.0 * round_ * NUMEL


def test_many_copies_end_in_their_order(staging: StreamStaging, device: torch.device) -> None:
    hosts = [allocate_privately(10, torch.float64) for _ in range(20)]
    for host in hosts:
        staging.pin(host)
    order: queue.SimpleQueue[tuple[int, list[float]]] = queue.SimpleQueue()
    for number, host in enumerate(hosts):
        source = torch.full((10,), float(number), device=device, dtype=torch.float64)  # nobody else keeps it
        staging.to_host(source, host, lambda number=number, host=host: order.put((number, host.tolist())))
        del source
    found = [order.get(timeout=PATIENCE_S) for _ in hosts]
    assert found == [(number, [float(number)] * 10) for number in range(20)]


def test_batches_come_ahead(staging: StreamStaging, device: torch.device) -> None:
    for pinned in (True, False):
        source = torch.arange(NUMEL, dtype=torch.int64)
        source = source.pin_memory() if pinned else source
        taken = staging.ahead(source)()
        assert (taken.device, int(taken.sum().cpu())) == (device, NUMEL * (NUMEL - 1) // 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_at_a_copys_end_is_raised_by_the_next_copy(staging: StreamStaging, device: torch.device) -> None:
    host, reached = allocate_privately(10, torch.float32), threading.Event()
    staging.pin(host)

    def fails() -> None:
        reached.set()
        raise RuntimeError("nobody is there any more")

    source = torch.zeros(10, device=device)
    staging.to_host(source, host, fails)
    assert reached.wait(PATIENCE_S)

    def go_on() -> None:
        for _ in range(1000):
            staging.to_host(source, host, lambda: None)()

    with pytest.raises(RuntimeError, match="nobody is there any more"):
        go_on()
