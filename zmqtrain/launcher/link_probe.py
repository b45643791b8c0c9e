"""A process on one host that examines it, and measures its links to the others, on request. An engine starts it.

It talks to `zmqtrain.launcher.probes`, which configures it by environment variables, like agents.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from zmqtrain.death import die_with_parent
from zmqtrain.errors import ConnectivityError, ProtocolError, ZmqTrainError
from zmqtrain.launcher.host_facts import facts_here
from zmqtrain.launcher.local import PARENT
from zmqtrain.membership.environment import COORDINATOR, RoleEnvironment
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.loop import run
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.processors import processors
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.world import wall_s

#: The number of round trips of a small message, of which the median is taken.
TRIPS = 50
#: The number of tensors in a bulk transfer; the time from the arrival of the first to that of the last is measured.
TENSORS = 9
SMALLEST_BYTES, LARGEST_BYTES = 64 << 10, 16 << 20
#: The turn number of a transfer that only shows whether tensors arrive.
BULK_TURN = -1
#: The size of a tensor is chosen so that it takes about this many seconds.
TENSOR_S = 0.05


def _multiply(count: int) -> float:
    import torch

    from zmqtrain.plan.measure.peak import measure_peak, threads
    from zmqtrain.plan.measure.timing import Patience

    with threads(min(count, processors())):
        return measure_peak(torch.device("cpu"), Patience(0.4, least=7, most=100)).product


class LinkProbe:
    """Answers requests until everything is measured."""

    def __init__(self, endpoint: Endpoint, *, patience_s: float, multiply: Callable[[int], float] = _multiply) -> None:
        """``patience_s``: the time-out of a measurement in seconds. ``multiply(threads)`` measures this host's speed, in
        operations per second."""
        self._endpoint, self._patience_s, self._product = endpoint, patience_s, multiply
        self.ended = asyncio.Event()
        """Set when everything is measured, or when the launcher is gone."""
        endpoint.on_lost(self._lost)
        for name in ("know", "look", "clock", "reach", "measure", "multiply", "trip", "take", "end"):
            endpoint.serve(f"probe.{name}", getattr(self, f"_{name}"))

    def _lost(self, peer: PeerId, _reason: str) -> None:
        if peer == COORDINATOR:
            self.ended.set()

    async def _know(self, _caller: PeerId, peer: Value, address: Value) -> Value:
        """Request: the address of another probe."""
        self._endpoint.add_peer(str(peer), str(address))
        return None

    async def _look(self, _caller: PeerId, names: Value, packages: Value, paths: Value) -> Value:
        """Request: the facts about this machine, and how names resolve here."""
        return await asyncio.to_thread(facts_here, _texts(names), _texts(packages), _texts(paths))

    async def _clock(self, _caller: PeerId) -> Value:
        """Request: the time of day here."""
        return wall_s()

    async def _reach(self, _caller: PeerId, others: Value, patience_s: Value) -> Value:
        """Request: connect to other probes on both lanes, as roles would. Returns the error for each probe that cannot be
        reached."""
        patience = float(patience_s) if isinstance(patience_s, int | float) else self._patience_s
        failed: dict[str, Value] = {}

        async def reach(other: str) -> None:
            try:
                await self._endpoint.request(other, "probe.trip", timeout=patience)
                async with asyncio.timeout(patience):
                    await self._transfer(other, BULK_TURN, SMALLEST_BYTES)
            except* TimeoutError:
                failed[other] = f"no answer within {patience:g} s"
            except* ZmqTrainError as errors:
                failed[other] = str(errors.exceptions[0])

        async with asyncio.TaskGroup() as tasks:
            for other in _texts(others):
                tasks.create_task(reach(other))
        return failed

    async def _measure(self, _caller: PeerId, target: Value) -> Value:
        """Request: measure the link to another probe. Returns bytes per second, and the seconds of a round trip."""
        to, clock = str(target), asyncio.get_running_loop().time
        trips = []
        for _ in range(TRIPS):
            start = clock()
            await self._endpoint.request(to, "probe.trip", timeout=self._patience_s)
            trips.append(clock() - start)
        rate = await self._transfer(to, 0, SMALLEST_BYTES)
        size = SMALLEST_BYTES
        for turn in range(1, 4):  # the first guess for a fast link is far too low, since small messages are mostly overhead
            larger = int(min(LARGEST_BYTES, max(SMALLEST_BYTES, rate * TENSOR_S)))
            if larger < 1.5 * size:
                break
            size = larger
            rate = await self._transfer(to, turn, size)
        return [rate, statistics.median(trips)]

    async def _transfer(self, to: PeerId, turn: int, size: int) -> float:
        payload = TensorPayload.of(np.ones(size // 4, np.float32))
        async with asyncio.TaskGroup() as tasks:
            taken = tasks.create_task(self._endpoint.request(to, "probe.take", turn, size // 4, timeout=self._patience_s))
            for number in range(TENSORS):
                await self._endpoint.send(to, ("probe", turn, number), payload)
        seconds = (await taken).meta
        if not isinstance(seconds, float) or seconds <= 0:
            raise ProtocolError(f"{to} reported an impossible time for a transfer: {seconds!r:.40}")
        return size * (TENSORS - 1) / seconds

    async def _trip(self, _caller: PeerId) -> Value:
        return None

    async def _take(self, caller: PeerId, turn: Value, numel: Value) -> Value:
        """Request: receive the tensors of a transfer. Returns the seconds from the arrival of the first to that of the last."""
        if not isinstance(turn, int) or not isinstance(numel, int) or not 0 < numel <= LARGEST_BYTES // 4:
            raise ProtocolError(f"{caller} announced a transfer in a wrong format")
        into, clock = TensorPayload.empty(numel, "float32"), asyncio.get_running_loop().time
        arrivals = []
        for number in range(TENSORS):
            await self._endpoint.receive(caller, ("probe", turn, number), into=into)
            arrivals.append(clock())
        return arrivals[-1] - arrivals[0]

    async def _multiply(self, _caller: PeerId, threads: Value) -> Value:
        """Request: the speed of the fastest matrix product here, in operations per second."""
        if not isinstance(threads, int) or not 0 < threads <= 4096:
            raise ProtocolError("a request probe.multiply does not give a number of threads")
        return await asyncio.to_thread(self._product, threads)

    async def _end(self, _caller: PeerId) -> Value:
        self.ended.set()
        return None


def _texts(values: Value) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ProtocolError("a request to a probe contains something that is not a list of strings")
    return [str(value) for value in values]


async def run_probe(environment: RoleEnvironment) -> int:
    """Run a probe. Returns the process's exit code."""
    timeouts = environment.timeouts
    # A short time-out is enough to connect: all probes have started before they are asked about each other.
    settings = replace(environment.settings(), greet_s=timeouts.connect_s)
    async with await open_zeromq(environment.peer, settings=settings) as endpoint:
        probe = LinkProbe(endpoint, patience_s=timeouts.barrier_s)
        endpoint.add_peer(COORDINATOR, environment.coordinator)
        await endpoint.request(COORDINATOR, "probe.here", endpoint.address, timeout=timeouts.join_s)
        await probe.ended.wait()
    return 0


def main() -> int:
    """The entry point of the process. Everything comes from the environment."""
    environment = RoleEnvironment.from_environ()
    if environment is None:
        print("link probes are started by `zmqtrain profile FILE --links` and `zmqtrain check FILE`", file=sys.stderr)
        return 2
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        die_with_parent(int(parent))
    try:
        return run(run_probe(environment))
    except ConnectivityError as error:
        print(f"{environment.peer}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
