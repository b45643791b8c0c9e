"""Handwritten digits, trained by replicas of torchft that may die and come back.

    pip install 'zmqtrain[torchft,examples]'
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 3000 --bind '[::]:29510'       # knows who is there
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_digits.py 0        # in three terminals:
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_digits.py 1        # one replica in each
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_digits.py 2

Kill one, and the others go on without it. Start it again, and it takes the model of another one and trains with them. On several
machines, set MASTER_ADDR to each one's own address.
"""

from __future__ import annotations

import argparse
import os
import zlib
from datetime import timedelta

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer

from zmqtrain.integrations.torchft import ProcessGroupZmq


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("replica", type=int)
    options.add_argument("--steps", type=int, default=500)
    given = options.parse_args()
    train, test = digits.load()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    host = os.environ.get("MASTER_ADDR", "localhost")  # where replicas on other machines find this one
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupZmq(timeout=timedelta(seconds=10))
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica_{given.replica}_",
        use_async_quorum=False,
        hostname=host,
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    generator = torch.Generator().manual_seed(given.replica)
    while manager.current_step() < given.steps:
        inputs, target = train[torch.randint(len(train), (32,), generator=generator)]
        optimizer.zero_grad()  # the replicas agree on who takes part
        loss = cross_entropy(parallel(inputs.flatten(1)), target)
        loss.backward()
        optimizer.step()  # only if all of them have the gradients
        parameters = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        checksum = f"{zlib.crc32(parameters.numpy().tobytes()):08x}"  # the same on all replicas
        replicas = manager.num_participants()
        print(f"step {manager.current_step()}: {replicas} replicas, loss {loss.item():.3f}, parameters {checksum}", flush=True)
    inputs, target = test[:]
    print(f"accuracy {(model(inputs.flatten(1)).argmax(1) == target).float().mean():.1%}")
    manager.shutdown(wait=False)
    group.shutdown()


if __name__ == "__main__":
    main()
