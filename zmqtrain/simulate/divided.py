"""A divided model on simulated hosts: each rank runs its own code without content, in virtual time for compute and messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from torch import nn

from zmqtrain.net.settings import NetSettings
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.trial import Trial, TrialRecorder, Tried, try_out
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.lockstep import LockstepThread
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.topology.links import NetworkModel

#: The most virtual seconds that a rank waits for another: networks may be slow, and no rank is lost here.
PATIENCE_S = 1e5


def simulate_divided(
    model: nn.Module,
    inputs: Sequence[Any],
    trial: Trial,
    network: NetworkModel,
    *,
    hosts: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Tried]:
    """Run some steps. Returns each rank's measurements. ``hosts``: each rank's host, by its name in ``network``; by default one per
    rank.

    The same arguments give the same times. Raises `UsageError` as `zmqtrain.parallelize` does.
    """
    places = list(hosts) if hosts is not None else [f"host{rank}" for rank in range(trial.grid.size)]
    return run_virtual(_run(model, inputs, trial, network, places, seed), seed=seed)


async def _run(
    model: nn.Module, inputs: Sequence[Any], trial: Trial, network: NetworkModel, hosts: Sequence[str], seed: int
) -> list[Tried]:
    simulated = SimulatedNetwork(network, random.Random(seed))
    peers = tuple(f"worker/{rank}" for rank in range(trial.grid.size))
    nodes = [simulated.endpoint(peer, host, NetSettings()) for peer, host in zip(peers, hosts, strict=True)]
    clock = asyncio.get_running_loop().time
    threads, fabrics = [], []

    async def rank(number: int) -> Tried:
        thread = LockstepThread(f"rank {number}")
        threads.append(thread)
        recorder = TrialRecorder(clock)
        fabric = NetworkFabric(
            nodes[number],
            peers,
            "trial",
            condition=thread.condition(),
            clock=clock,
            timeout_s=PATIENCE_S,
            recorder=recorder,
        )
        fabrics.append(fabric)
        return await thread.submit(lambda: try_out(model, inputs, trial, fabric, recorder, _Virtual(thread), clock))

    try:
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(rank(number)) for number in range(trial.grid.size)]
        return [task.result() for task in found]
    finally:
        for fabric in fabrics:
            await fabric.close()
        for thread in threads:
            await thread.close(1.0)
        for node in nodes:
            await node.close()


class _Virtual:
    """Implements `Spender`."""

    def __init__(self, thread: LockstepThread) -> None:
        self._thread = thread

    def spend(self, seconds: float) -> None:
        self._thread.spend(seconds)

    def restart(self) -> None:
        return None
