"""A worker of `DistributedDataParallel` with gloo, plain or under torchft: the peer of ``python -m benchmarks failures``.

Runs in an environment with torch and torchft, and imports nothing else::

    python torchft_ddp.py plain|torchft RANK WORKERS PORT LIGHTHOUSE LOG SECONDS STEP_S

It is set up as torchft's own example for DDP is: gloo with 5 s, one replica group a process, a `Manager` that asks for two
replicas.
Each committed step appends its time, in seconds since the epoch, to LOG. PORT: of the store; under torchft of this worker's own.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Take steps for the given seconds."""
    kind, rank, workers, port, lighthouse, log, seconds, step_s = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if kind == "plain":
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(workers))
        network, stepper, manager = nn.parallel.DistributedDataParallel(model), optimizer, None
    else:
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", int(port), is_master=True, wait_for_workers=False
        )

        def load_state_dict(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            min_replica_size=2,
            load_state_dict=load_state_dict,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            replica_id=f"train_ddp_{rank}",
            timeout=timedelta(seconds=30),
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
        )
        network, stepper = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    end = time.time() + float(seconds)
    inputs, target = torch.randn(16, 512), torch.randn(16, 1)
    with open(log, "a", buffering=1) as file:
        while time.time() < end:
            before = manager.current_step() if manager is not None else -1
            stepper.zero_grad()
            output = network(inputs)
            time.sleep(float(step_s))
            nn.functional.mse_loss(output, target).backward()  # type: ignore[no-untyped-call]
            stepper.step()
            if manager is None or manager.current_step() > before:
                file.write(f"{time.time()}\n")
    if manager is not None:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
