"""A program with torch.distributed: ``program.py BACKEND WHAT``. Prints what it has computed."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zmqtrain.c10d  # noqa: F401 - registers the backend


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
    else:
        dist.barrier()
        print("waiting", flush=True)
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            sys.stdin.read()
            dist.recv(torch.ones(3), 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
