"""A worker of another system, for ``python -m benchmarks quality``: it trains the same task until the same validation loss.

Runs where torch, zmqtrain's dependencies, and the system are installed (``ddp`` needs only torch)::

    python -m benchmarks.quality_peer ddp|localsgd|diloco|hivemind|mxnet PROBLEM LR SEED DATA FOLDER

with the variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OWN_ADDR, for torchft LIGHTHOUSE, and for MXNet its own. Each is
set up as its own documentation shows, here named at each. Every `EVALUATE_EVERY` steps a worker evaluates its model on its share
of the samples, as ours do, and appends seconds, the sum of the losses, and their number to FOLDER/log-RANK; nobody waits for
others. The clock runs from the first step on, when all are there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from benchmarks.quality_task import EVALUATE_EVERY, MOMENTUM, PROBLEMS, WEIGHT_DECAY, task
from zmqtrain import Task

#: torchft: steps between two averagings of LocalSGD, as in its example for it, and of DiLoCo, as in its own.
LOCAL_STEPS, DILOCO_STEPS = 32, 20
PATIENCE = timedelta(seconds=60)

#: What a system makes of model and optimizer: the module to call, and what is called after a step's backward.
Made = tuple[nn.Module, Callable[[], Any], Callable[[], Any]]


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Made:
    """PyTorch's DistributedDataParallel with gloo."""
    return nn.parallel.DistributedDataParallel(model), optimizer.zero_grad, optimizer.step


def localsgd(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Made:
    """torchft's LocalSGD."""
    from torchft.local_sgd import LocalSGD

    stack.enter_context(LocalSGD(_manager(model, optimizer), model, optimizer, sync_every=LOCAL_STEPS))
    return model, optimizer.zero_grad, optimizer.step


def diloco(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Made:
    """torchft's DiLoCo, with the outer optimizer of its example."""
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = _manager(model, optimizer, use_async_quorum=False)
    stack.enter_context(DiLoCo(manager, [model], optimizer, outer, sync_every=DILOCO_STEPS))
    return model, optimizer.zero_grad, optimizer.step


def hivemind(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Made:
    """hivemind's Optimizer as in its quickstart: local updates, and averaging every 10,000 samples of all peers."""
    import hivemind as package  # type: ignore[import-not-found]

    shared = Path(sys.argv[6], "maddrs")
    own, rank = os.environ["OWN_ADDR"], int(os.environ["RANK"])
    places = {"host_maddrs": [f"/ip4/{own}/tcp/0"], "announce_maddrs": None}
    if rank == 0:
        dht = package.DHT(start=True, host_maddrs=places["host_maddrs"])
        shared.with_suffix(".new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        shared.with_suffix(".new").rename(shared)
    dist.barrier()
    if rank:
        dht = package.DHT(start=True, host_maddrs=places["host_maddrs"], initial_peers=shared.read_text().split("\n"))
    wrapped = package.Optimizer(
        dht=dht,
        run_id="quality",
        batch_size_per_step=PROBLEMS[sys.argv[2]].batch,
        target_batch_size=10000,
        optimizer=optimizer,
        use_local_updates=True,
        matchmaking_time=3.0,
        averaging_timeout=10.0,
        verbose=True,
    )
    stack.callback(dht.shutdown)
    stack.callback(wrapped.shutdown)
    return model, wrapped.zero_grad, wrapped.step


def mxnet(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Made:
    """MXNet's synchronous parameter servers, used as its Trainer does: they run the optimizer, and every parameter's gradient is
    pushed, and its value pulled, with the priority of its place in forward. Torch computes the gradients."""
    import mxnet as package  # type: ignore[import-not-found]

    store = package.kv.create("dist_sync")
    lr, parameters = float(sys.argv[3]), list(model.parameters())
    scale = 1 / int(os.environ["WORLD_SIZE"])  # a server adds up the workers' gradients
    if sys.argv[2] == "cifar":
        update = package.optimizer.SGD(learning_rate=lr, momentum=MOMENTUM, wd=WEIGHT_DECAY, rescale_grad=scale)
    else:
        update = package.optimizer.Adam(learning_rate=lr, rescale_grad=scale)
    for key, parameter in enumerate(parameters):
        store.init(key, package.nd.array(parameter.detach().numpy()))
    store.set_optimizer(update)
    values = [package.nd.zeros(tuple(parameter.shape)) for parameter in parameters]

    def step() -> None:
        for key, parameter in enumerate(parameters):
            assert parameter.grad is not None
            store.push(key, package.nd.array(parameter.grad.numpy()), priority=-key)
            store.pull(key, out=values[key], priority=-key)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(torch.from_numpy(value.asnumpy()))

    return model, optimizer.zero_grad, step


SYSTEMS = {"ddp": ddp, "localsgd": localsgd, "diloco": diloco, "hivemind": hivemind, "mxnet": mxnet}


#: Stores that others reach by their addresses, as long as this process lives.
_SERVING: list[Any] = []


def _manager(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    from torchft import Manager, ProcessGroupGloo

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    own = os.environ["OWN_ADDR"]
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    _SERVING.append(store)
    return Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        min_replica_size=int(os.environ["WORLD_SIZE"]),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"worker_{os.environ['RANK']}",
        timeout=PATIENCE,
        quorum_timeout=timedelta(hours=1),
        store_addr=own,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=own,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        **more,
    )


def batches(made: Task, data: Dataset[Any], size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """A worker's batches, without end."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, size, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield made.transform(tuple(batch)) if made.transform is not None else tuple(batch)
        epoch += 1


def evaluated(made: Task, model: nn.Module) -> tuple[float, int]:
    """The sum of the validation losses of this worker's samples, and their number."""
    data: Any = made.eval_data
    own = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for inputs, target in DataLoader(own, 500):
            total, count = total + float(made.loss(model(inputs), target)) * len(inputs), count + len(inputs)
    model.train()
    return total, count


def main() -> None:
    """Train."""
    system, problem, lr, seed, data, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    made = task(data, problem, float(lr))
    model = made.model()
    optimizer: Any = made.optimizer(list(model.parameters()))
    dist.init_process_group("gloo")  # plain DDP trains by it; the others meet by it before their first step
    with ExitStack() as stack, open(Path(folder, f"log-{dist.get_rank()}"), "a", buffering=1) as log:
        network, begin, step = SYSTEMS[system](model, optimizer, stack)
        drawn = batches(made, made.train_data, PROBLEMS[problem].batch, int(seed))
        dist.barrier()
        began, number = time.monotonic(), 0
        while True:
            inputs, target = next(drawn)
            begin()
            loss: Tensor = made.loss(network(inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            step()
            number += 1
            if number % EVALUATE_EVERY == 0:
                total, count = evaluated(made, model)
                log.write(f"{time.monotonic() - began} {total} {count}\n")


if __name__ == "__main__":
    main()
