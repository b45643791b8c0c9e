"""``python -m benchmarks backend``: all-reduce between two machines behind NICs of 1 and 10 Gbit/s, beside gloo: how long it takes,
and how much processor time. For root.

The machines are network namespaces of this one, with process numbers of their own, so that their ranks share no memory. The zmq
backend, encrypted as by default and in plain text, and gloo take turns in the same processes; with small tensors also bare pyzmq,
which carries as many bytes both ways in plain text, and adds nothing. A rank is this module, started with torchrun's variables;
rank 0 prints its seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from benchmarks.case import Case, case_of
from benchmarks.ranks import said_by_first
from benchmarks.sodium import encryption_s
from zmqtrain.errors import ZmqTrainError
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError

ROOT = Path(__file__).parents[1]
#: Payload bytes a second of the NICs, by their names.
NICS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1250e6}
#: Of a bucket of DistributedDataParallel, and of a small tensor, which is reduced so often in a round.
NBYTES = 25 * 1024 * 1024
SMALL_NBYTES, SMALL_CALLS = 64 * 1024, 100
RANKS = 2
BARE = "bare pyzmq"
ROUNDS, LEFT_OUT = 15, 3
PATIENCE_S = 300.0
#: What is measured; processor time is that of one of the two processes.
LARGE, LARGE_PROCESSOR = "25 MiB", "25 MiB, processor time"
SMALL, SMALL_PROCESSOR = "64 KiB", "64 KiB, processor time"


def bench_backend() -> Iterator[Case]:
    """The cases of both speeds."""
    for name, rate in NICS.items():
        try:
            encrypted, plain = (_ranks(rate, encryption) for encryption in ("required", "disabled"))
        except NoNamespacesError as error:
            print(f"left out: {error}", file=sys.stderr)
            return
        for said, seconds in (("encrypted", encrypted), ("plain", plain)):
            for measured, ours in seconds["zmq"].items():
                text = f"all-reduce between two machines, {name}, {said}: {measured}"
                yield case_of("backend", text, 1e3 * ours, "ms", "gloo", 1e3 * seconds["gloo"][measured], "peer/value")
                if measured in seconds[BARE]:
                    yield case_of("backend", text, 1e3 * ours, "ms", BARE, 1e3 * seconds[BARE][measured], "peer/value")
        # Each rank sends one tensor's bytes, and receives as many.
        yield case_of("backend", f"link use, {name}, plain", 100 * NBYTES / plain["zmq"][LARGE] / rate, "%")
    sodium = encryption_s(NBYTES)
    if sodium is not None:
        yield case_of("backend", "libsodium alone, to encrypt 25 MiB and decrypt as many: processor time", 1e3 * sodium, "ms")


def _ranks(rate: float, encryption: str) -> dict[str, dict[str, float]]:
    """For each backend, the medians of what rank 0 measures, in seconds."""
    names = [f"m{number}" for number in range(RANKS)]
    hosts = Namespaces(dict.fromkeys(names, rate))

    def start(number: int, name: str) -> subprocess.Popen[str]:
        variables = {
            **{"RANK": str(number), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            **{"MASTER_ADDR": hosts.address_of(names[0]), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"},
            "ADDRESS": hosts.address_of(name),
            "ZMQTRAIN_TRANSPORT_ENCRYPTION": encryption,
        }
        apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
        words = ["env", *(f"{key}={value}" for key, value in variables.items()), sys.executable, "-m", "benchmarks.backend"]
        command = hosts.command(name, (*apart, *words))
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    try:
        asyncio.run(hosts.open())
        starts = (start(*each) for each in enumerate(names))
        found: dict[str, dict[str, float]] = said_by_first(starts, "a rank", timeout_s=PATIENCE_S)
    finally:
        asyncio.run(hosts.close())
    return found


class Exchange:
    """Both processes send each other as many bytes with bare pyzmq: a ROUTER that receives, and a DEALER that sends."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        address = os.environ["ADDRESS"]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router, self._dealer = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        port = self._router.bind_to_random_port(f"tcp://{address}")
        places: list[Any] = [None] * RANKS
        dist.all_gather_object(places, f"tcp://{address}:{port}", group=group)
        self._dealer.connect(places[1 - dist.get_rank()])
        self._content = bytes(SMALL_NBYTES)

    def __call__(self) -> None:
        self._dealer.send(self._content, copy=True)
        self._router.recv()
        self._router.recv(copy=False)

    def close(self) -> None:
        """Close its sockets."""
        self._context.destroy(linger=0)


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("zmq")
    groups = {"zmq": None, "gloo": dist.new_group(backend="gloo")}
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = Exchange(groups["gloo"])
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in (*groups, BARE)}
    for large in (True, False):
        tensors = {name: torch.empty((NBYTES if large else SMALL_NBYTES) // 4) for name in groups}
        calls = 1 if large else SMALL_CALLS
        for _ in range(ROUNDS):
            for name, group in groups.items():
                tensors[name].fill_(rank + 1.0)
                dist.barrier(groups["gloo"])
                began, processor = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    dist.all_reduce(tensors[name], group=group)
                taken, worked = time.perf_counter() - began, time.process_time() - processor
                found = seconds[name]
                found.setdefault(LARGE if large else SMALL, []).append(taken / calls)
                found.setdefault(LARGE_PROCESSOR if large else SMALL_PROCESSOR, []).append(worked / calls)
                if large and not bool((tensors[name] == size * (size + 1) / 2).all()):
                    raise ZmqTrainError(f"{name} sums wrongly")
            if not large:
                dist.barrier(groups["gloo"])
                began, processor = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    bare()
                taken, worked = time.perf_counter() - began, time.process_time() - processor
                seconds[BARE].setdefault(SMALL, []).append(taken / calls)
                seconds[BARE].setdefault(SMALL_PROCESSOR, []).append(worked / calls)
    dist.barrier(groups["gloo"])
    bare.close()
    if rank == 0:
        medians = {
            name: {measured: statistics.median(taken[LEFT_OUT:]) for measured, taken in found.items()}
            for name, found in seconds.items()
        }
        print(json.dumps(medians), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
