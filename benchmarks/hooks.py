"""``python -m benchmarks hooks``: the processor time of a step of DistributedDataParallel with the zmq backend and with gloo, and
what any backend could reach: hooks that communicate nothing, and that only move the bytes.

All of them take turns, step by step, in the same model and processes. A rank is this module, started with torchrun's variables;
rank 0 prints its figures. Processor time is changed less by a busy machine than seconds are.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, case_of
from benchmarks.ranks import said_by_first

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parents[1]
MODELS = ("transformer", "alexnet")
WORLDS = (2, 4)
BATCH, ROUNDS, LEFT_OUT = 8, 11, 4
PATIENCE_S = 900.0
#: No communication at all; and as many bytes of each bucket read and written as an all-reduce in shared memory must, by this
#: process alone.
NOTHING, BYTES = "no communication", "the bytes alone"


def bench_hooks() -> Iterator[Case]:
    """The cases of all models and numbers of processes."""
    for model in MODELS:
        for world in WORLDS:
            times = _ranks(model, world)
            for name in ("zmq", BYTES, NOTHING):
                text = f"DistributedDataParallel, {model}, batch {BATCH}, {world} processes: processor time of a step, {name}"
                yield case_of("hooks", text, 1e3 * times[name], "ms", "gloo", 1e3 * times["gloo"])


def _ranks(model: str, world: int) -> dict[str, float]:
    """The seconds of each way, a median of steps, on average over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "STORE": f"{folder}/store"}
        words = (sys.executable, "-m", "benchmarks.hooks", model)
        starts = (
            subprocess.Popen(
                words,
                env={**os.environ, **variables, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        )
        found: dict[str, float] = said_by_first(starts, "a rank", timeout_s=PATIENCE_S)
    return found


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks import models

    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("zmq", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")

    def summed_by(group: Any) -> Callable[[Tensor], Any]:
        # DistributedDataParallel divides as it copies into its bucket: the hook need not.
        return lambda bucket: dist.all_reduce(bucket, group=group, async_op=True).get_future().then(lambda done: done.value()[0])

    def moved(bucket: Tensor) -> Any:
        own, *others = bucket[: len(bucket) // size * size].chunk(size)
        for part in others:
            own.add_(part)
        for part in others:
            part.copy_(own)
        return _done(bucket)

    ways = {"zmq": summed_by(None), "gloo": summed_by(gloo), NOTHING: _done, BYTES: moved}
    way = ["zmq"]
    replica = DistributedDataParallel(getattr(models, name)())
    replica.register_comm_hook(None, lambda _, bucket: ways[way[0]](bucket.buffer()))
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, *((models.SEQUENCE, models.WIDTH) if name == "transformer" else (3, 224, 224)))
    target = torch.randint(1000, (BATCH,))
    times: dict[str, list[float]] = {each: [] for each in ways}
    for number in range(LEFT_OUT + ROUNDS):
        for each in ways:
            way[0] = each
            dist.barrier(gloo)
            began = time.process_time()
            optimizer.zero_grad()
            functional.cross_entropy(replica(inputs), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number >= LEFT_OUT:
                times[each].append(time.process_time() - began)
    found = torch.tensor([statistics.median(taken) for taken in times.values()], dtype=torch.float64)
    dist.all_reduce(found)
    if rank == 0:
        print(json.dumps(dict(zip(times, (found / size).tolist(), strict=True))), flush=True)
    dist.destroy_process_group()


def _done(bucket: Tensor) -> Any:
    import torch

    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket)
    return future


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
