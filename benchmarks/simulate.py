"""``python -m benchmarks simulate``: how large a world one processor simulates, and how fast."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.case import Case, case_of
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.topology.links import NetworkModel, Way
from zmqtrain.wire.phantom import PhantomPayload

WORKERS = (256, 1024, 4096)
STEPS = 10
BUCKETS = 8
#: Of float32 numbers in a bucket: a megabyte.
NUMEL = 250_000
LATENCY_S = 200e-6
BITS_PER_S = 1e9


def bench_simulate(*, workers: Sequence[int] = WORKERS) -> Iterator[Case]:
    """For each number of workers: seconds, messages a second, and the most memory so far.

    At each step every worker sends each of its buckets to one neighbour, and gets as many from another, as gossip does: to rank
    + 2^(step mod log2 p), over real endpoints on the simulated network, payloads being sizes only.
    """
    for number in workers:
        began = time.perf_counter()
        virtual_s = neighbour_exchange(number)
        took_s = time.perf_counter() - began
        messages = number * STEPS * BUCKETS
        case = f"{number} workers, {STEPS} steps of {BUCKETS} buckets"
        yield case_of("simulate", case, took_s, "s")
        yield case_of("simulate", f"{case}: messages", messages / took_s, "1/s")
        yield case_of("simulate", f"{case}: virtual time", virtual_s, "s")
        yield case_of("simulate", f"{case}: most memory so far", _peak_mib(), "MiB")


def neighbour_exchange(workers: int, *, steps: int = STEPS, buckets: int = BUCKETS, numel: int = NUMEL) -> float:
    """Virtual seconds that the exchange takes."""
    distances = [1 << shift for shift in range(max(1, (workers - 1).bit_length()))]
    distances = [distance for distance in distances if distance < workers]

    async def main() -> float:
        network = SimulatedNetwork(NetworkModel(bandwidth=BITS_PER_S, way=Way(LATENCY_S)), random.Random(1))
        nodes = [network.endpoint(f"worker/{rank}", f"host{rank}") for rank in range(workers)]

        async def worker(rank: int) -> None:
            node = nodes[rank]
            for step in range(steps):
                distance = distances[step % len(distances)]
                to, source = f"worker/{(rank + distance) % workers}", f"worker/{(rank - distance) % workers}"
                for bucket in range(buckets):
                    await node.send(to, ("bucket", step, bucket), PhantomPayload(numel))
                for bucket in range(buckets):
                    await node.receive(source, ("bucket", step, bucket))

        async with asyncio.TaskGroup() as tasks:
            for rank in range(workers):
                tasks.create_task(worker(rank))
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
