"""A program with torch.distributed: ``program.py BACKEND WHAT``. Prints what it has computed.

``program.py WHAT FOLDER RANKS BACKEND ...`` is all ranks of each of these backends, in processes that share one import of torch.
What each prints is in ``FOLDER/BACKEND-RANK``."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zmqtrain.c10d
from zmqtrain.errors import UsageError
from zmqtrain.exchange.gossip.schedule import Schedule


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4)).double()


def train(replica: nn.Module) -> None:
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        loss = replica(torch.randn(8, 10, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.12f}")


def gossip(size: int) -> None:
    """Groups of two ranks; each has the parameters that one process would compute by the same schedule."""
    state = zmqtrain.Gossip(2, seed=3)
    mine = model()
    with torch.no_grad():
        mine[0].weight.add_(0.01 * dist.get_rank())
    state.average(mine)
    replica = DistributedDataParallel(mine, process_group=state.within, bucket_cap_mb=0.001)
    replica.register_comm_hook(state, zmqtrain.ddp_comm_hook)
    groups, schedule = size // 2, Schedule(size // 2, 3)
    alone = [model() for _ in range(groups)]
    for each in alone:
        with torch.no_grad():
            each[0].weight.add_(0.01 * (size - 1) / 2)
    data = [torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(size)]
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        replica(data[dist.get_rank()][step]).square().mean().backward()
        optimizer.step()
        found = []
        for group, each in enumerate(alone):
            loss = sum(each(data[rank][step]).square().mean() for rank in (2 * group, 2 * group + 1)) / 2
            found.append(torch.autograd.grad(loss, list(each.parameters())))
        for group, each in enumerate(alone):
            partners = schedule.partners(step, group)
            assert partners is not None
            with torch.no_grad():
                for parameter, own, other in zip(each.parameters(), found[group], found[partners.sources[0]], strict=True):
                    parameter.sub_(0.1 * (own + other) / 2)
    expected = alone[dist.get_rank() // 2]
    apart = max(float((one - other).abs().max()) for one, other in zip(mine.parameters(), expected.parameters(), strict=True))
    state.average(mine)
    mean = [torch.stack(each).mean(0) for each in zip(*(each.parameters() for each in alone), strict=True)]
    apart = max(apart, *(float((one - other).abs().max()) for one, other in zip(mine.parameters(), mean, strict=True)))
    print("apart by less than 1e-12:", apart < 1e-12)


def servers(size: int, policy: str) -> None:
    """Groups of two ranks at model servers; when they wait for each other, it is one process on everybody's data."""
    mine, alone = model(), model()
    with torch.no_grad():
        mine[0].weight.add_(0.01 * dist.get_rank())
    settings = {"lr": 0.05, "momentum": 0.9}
    optimizer = torch.optim.SGD(mine.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = [torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(size)]
    with zmqtrain.ModelServers(mine, optimizer, 2, staleness="sync" if policy == "sync" else "async", bucket_bytes=1000) as state:
        replica = DistributedDataParallel(mine, process_group=state.within, bucket_cap_mb=0.001)
        replica.register_comm_hook(state, zmqtrain.ddp_comm_hook)
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            loss = replica(data[dist.get_rank()][step]).square().mean()
            losses.append(loss.item())
            loss.backward()
            state.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # schedules warn of an optimizer that has not stepped
                schedule.step()
    if policy == "sync":
        reference = torch.optim.SGD(alone.parameters(), **settings)
        schedule = torch.optim.lr_scheduler.StepLR(reference, 2)
        for step in range(6):
            reference.zero_grad()
            sum(alone(data[rank][step]).square().mean() / size for rank in range(size)).backward()
            reference.step()
            schedule.step()
        apart = max(float((one - other).abs().max()) for one, other in zip(mine.parameters(), alone.parameters(), strict=True))
        print("apart by less than 1e-12:", apart < 1e-12)
    else:
        print("learns:", losses[-1] < losses[0])


def averaging(size: int) -> None:
    """Groups of two ranks; DiLoCo every two steps is torch's SGD with Nesterov momentum on the mean change of their models."""
    mine = model()
    with torch.no_grad():
        mine[0].weight.add_(0.01 * dist.get_rank())
    state = zmqtrain.Averaging(mine, 2, every=2)
    replica = DistributedDataParallel(mine, process_group=state.within, bucket_cap_mb=0.001)
    replica.register_comm_hook(state, zmqtrain.ddp_comm_hook)
    groups = size // 2
    alone, outer = [model() for _ in range(groups)], model()
    with torch.no_grad():
        for each in [*alone, outer]:
            each[0].weight.add_(0.01 * (size - 1) / 2)
    data = [torch.randn(5, 8, 10, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(size)]
    inner = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (mine, *alone)]
    above = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        for optimizer in inner:
            optimizer.zero_grad()
        replica(data[dist.get_rank()][step]).square().mean().backward()
        for group, each in enumerate(alone):
            (sum(each(data[rank][step]).square().mean() for rank in (2 * group, 2 * group + 1)) / 2).backward()
        for optimizer in inner:
            optimizer.step()
        state.step()
        if step % 2:
            for parameter, *found in zip(outer.parameters(), *(each.parameters() for each in alone), strict=True):
                parameter.grad = parameter.detach() - torch.stack([each.detach() for each in found]).mean(0)
            above.step()
            for each in alone:
                each.load_state_dict(outer.state_dict())
    expected = alone[dist.get_rank() // 2]
    apart = max(float((one - other).abs().max()) for one, other in zip(mine.parameters(), expected.parameters(), strict=True))
    print("apart by less than 1e-12:", apart < 1e-12)
    other = zmqtrain.Averaging(mine, 2, every=2)
    replica = DistributedDataParallel(mine, process_group=other.within)
    replica.register_comm_hook(other, zmqtrain.ddp_comm_hook)
    mine.load_state_dict(model().state_dict())
    replica(data[0][0]).square().mean().backward()
    try:
        other.step()
    except UsageError as error:
        print("refused:", "load a model before you make Averaging" in str(error))


def widely(rank: int, folder: str) -> None:
    """What else programs and frameworks ask of a backend."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    with torch.inference_mode():  # Lightning's validate
        seen = torch.ones(2) * (rank + 1)
        dist.all_reduce(seen)
    print("inference", seen.tolist())
    table = nn.Embedding(10, 4, sparse=True).double()
    nn.init.ones_(table.weight)
    DistributedDataParallel(table)(torch.tensor([rank, 1])).sum().backward()
    print("sparse gradients", table.weight.grad.to_dense()[:3, 0].tolist())
    compiled = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    for _ in range(2):  # the second forward arranges the buckets anew
        compiled(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
    print("compiled", [each.grad.sum().item() for each in compiled.parameters()])
    hooked = DistributedDataParallel(nn.Linear(64, 64))
    hooked.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        hooked(torch.ones(2, 64)).sum().backward()
    print("PowerSGD ends")
    if dist.get_backend() == "zmq":  # with gloo this hangs, or ends with other gradients on each rank
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        several = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        several.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
        for _ in range(6):
            several(torch.ones(2, 64) * rank).sum().backward()
        gradients = torch.cat([each.grad.flatten() for each in several.parameters()])
        both = [torch.empty_like(gradients) for _ in range(2)]
        dist.all_gather(both, gradients)
        assert torch.equal(*both)
    replica = DistributedDataParallel(model())
    with replica.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            replica(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
    print("uneven inputs", [each.grad.sum().item() for each in replica.parameters()])
    built_in = DistributedDataParallel(model())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    built_in(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
    print("built-in hook", [each.grad.sum().item() for each in built_in.parameters()])
    half = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    half._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    half(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
    print("built-in hook of half precision", [each.grad.sum().item() for each in half.parameters()])
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    parts = sharded_tensor.ones(ChunkShardingSpec(0, [f"rank:{each}/cpu" for each in range(2)]), 5, 2)
    joined = torch.zeros(5, 2) if rank == 0 else None
    parts.gather(0, joined)
    print("sharded tensor", joined)
    dcp.async_save({"weight": built_in.module[0].weight}, checkpoint_id=f"{folder}.saved").result()
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1], backend="gloo"))
    with dist._coalescing_manager():
        dist.all_reduce(total)
    print("total", total.item())


def main(backend: str, what: str) -> None:
    """One rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend, init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    if what == "train":
        train(DistributedDataParallel(model()))
        pair = dist.new_group([0, 1])
        objects: list[object] = [None, None]
        dist.all_gather_object(objects, {"rank": rank}, group=pair)
        print(objects)
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        sharded = model()
        mesh = init_device_mesh("cpu", (size,))
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        train(fully_shard(sharded, mesh=mesh))
        left = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
        right = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Replicate()])
        print((left @ right).redistribute(mesh, [Shard(1)]).full_tensor())
    elif what == "widely":
        widely(rank, os.environ["STORE"])
        dist.destroy_process_group()
        dist.init_process_group(
            backend, init_method=f"file://{os.environ['STORE']}-2", rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        dist.barrier()
    elif what == "hooks":
        gossip(size)
        servers(size, "sync")
        servers(size, "async")
        averaging(size)
    else:
        replica = DistributedDataParallel(model())
        for _ in range(2):  # the buckets are arranged anew
            replica(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
        dist.barrier()
        print("waiting", flush=True)
        if rank == 0:
            replica(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
        else:
            sys.stdin.read()
            dist.recv(torch.ones(3), 0)
    dist.destroy_process_group()


def main_of_all(what: str, folder: str, size: int, backends: list[str]) -> int:
    """Returns how many ranks have failed."""
    # What each would import before its first step, more than a second.
    for module in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"):
        import_module(module)
    gc.freeze()
    ranks = [(backend, rank) for backend in backends for rank in range(size)]
    children = []
    for backend, rank in ranks:
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "STORE": f"{folder}/store-{backend}"}
            with open(f"{folder}/{backend}-{rank}", "w") as printed:
                os.dup2(printed.fileno(), 1)
                main(backend, what)
                sys.stdout.flush()
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        sys.exit(main_of_all(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
    main(*sys.argv[1:])
