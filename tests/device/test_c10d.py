"""The zmq backend of torch.distributed with tensors of a device, in threads that each are a rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.c10d.test_process_group import groups_of, options
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d import ZmqProcessGroup

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
Work = Callable[[ZmqProcessGroup, Callable[[Tensor], Tensor]], Tensor]


def all_reduce(group: ZmqProcessGroup, here: Callable[[Tensor], Tensor]) -> Tensor:
    tensor = here(torch.arange(7.0) + group.rank())
    handle = group.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.SUM))
    future = handle.get_future().then(lambda done: done.value()[0] * 2)
    handle.wait()
    return future.wait()


def broadcast(group: ZmqProcessGroup, here: Callable[[Tensor], Tensor]) -> Tensor:
    tensor = here(torch.full((3, 4), float(group.rank()))).t()  # not contiguous
    group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=1)).wait()
    return tensor


def all_gather(group: ZmqProcessGroup, here: Callable[[Tensor], Tensor]) -> Tensor:
    found = here(torch.zeros(4))
    group.all_gather_single(found, here(torch.tensor([1.0, 2.0]) * group.rank())).wait()
    return found


def gather(group: ZmqProcessGroup, here: Callable[[Tensor], Tensor]) -> Tensor:
    found = [here(torch.zeros(2)) for _ in range(2)]
    targets = [found] if group.rank() == 0 else []
    group.gather(targets, [here(torch.tensor([1.0, group.rank()]))], options(dist.GatherOptions, rootRank=0)).wait()
    return torch.cat(found)


def reduce_scatter(group: ZmqProcessGroup, here: Callable[[Tensor], Tensor]) -> Tensor:
    part = here(torch.zeros(3))
    group.reduce_scatter_single(part, here(torch.arange(6.0) * (1 + group.rank()))).wait()
    return part


def one_to_the_other(group: ZmqProcessGroup, here: Callable[[Tensor], Tensor]) -> Tensor:
    tensor = here(torch.arange(5) if group.rank() == 0 else torch.zeros(5, dtype=torch.long))
    (group.send([tensor], 1, 3) if group.rank() == 0 else group.recv([tensor], 0, 3)).wait()
    return tensor


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("work", [all_reduce, broadcast, all_gather, gather, reduce_scatter, one_to_the_other])
def test_the_results_are_those_of_the_cpu(work: Work, hosts: str, device: torch.device) -> None:
    found: list[list[Any]] = []
    for where in (device, torch.device("cpu")):
        groups = groups_of(2, hosts=hosts)
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda group, where=where: work(group, lambda tensor: tensor.to(where)), groups))
        assert all(result.device.type == where.type for result in results)
        found.append([result.tolist() for result in results])
        for group in groups:
            group.shutdown()
    assert found[0] == found[1]


def test_what_is_queued_on_a_stream_of_ones_own_comes_first(device: torch.device) -> None:
    """On a GPU; elsewhere nothing is queued."""
    if device.type != "cuda":
        pytest.skip("the stand-in computes at once")
    groups = groups_of(2)

    def work(group: ZmqProcessGroup) -> float:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            numbers = torch.ones(2048, 2048, device=device)
            for _ in range(50):
                numbers = numbers @ torch.eye(2048, device=device)
            group.allreduce([numbers]).wait()
            return float(numbers.sum())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, groups)) == [2.0 * 2048 * 2048] * 2
    for group in groups:
        group.shutdown()
