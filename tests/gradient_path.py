"""Which modules of the package a gradient passes, from a trace of two workers in one process.

What counts: a module of `zmqtrain` of which a function, a method, a property or a coroutine runs (begins or goes on), in whatever
thread, between two moments of a step: both workers have done their forward, and backward begins with the only bucket of the model;
and the next forward of both has the bucket's new parameters. The model is one layer of plain torch, which leaves nothing of the
package to be done before its gradient is complete.

What does not count, though it may run meanwhile: what only records the step (`zmqtrain.events`), the device's clock, which is
read for that (`zmqtrain.train.device`), what sockets tell of their connections a while after these were made
(`zmqtrain.net.monitor`), and the mutex of ranks in one process, which a forward hands over if it has to wait at all
(`zmqtrain.parallel.turns`). No coordinator, agent or heartbeat takes part, and of an endpoint's timers only that of
acknowledgements is due within a step.

``python -m tests.gradient_path`` prints the table of docs/architecture.md as it should be, with ``?`` where a module is new to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.arena import Arena
from zmqtrain.collectives.group import Group
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.gossip.exchange import GossipExchange, GossipSettings
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.exchange.sums import HostSums, NetworkSums
from zmqtrain.host.member import ArenaMember
from zmqtrain.host.team import Team
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.server.model_server import ModelServer, ServerSettings
from zmqtrain.train.device.cpu import CpuDevice
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.shared import allocate_in

DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
#: Elements of the bucket: more than is computed on the event loop itself, less than travels in several chunks.
NUMEL = 1 << 17
#: No timer of an endpoint is due within this time, and nothing that is waited for takes as long.
LONG_S = 50.0
#: Steps before the trace begins: connections are made, and optimizers have their state.
WARM_UP = 2
TRACED = 2
#: Beside the way: records, the device, monitors, locks of threads, and the stand-in for torch's compiler, which optimizers ask.
NOT_COUNTED = (
    "zmqtrain.events",
    "zmqtrain.train.device",
    "zmqtrain.net.monitor",
    "zmqtrain.parallel.turns",
    "zmqtrain.train.compiler",
)
WORKERS = ("worker/0", "worker/1")
SERVER = "server/0"


class Trace:
    """Modules in the order in which they are called first."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.on or event != "call":
            return
        name = frame.f_globals.get("__name__", "")
        if name.startswith("zmqtrain.") and not name.startswith(NOT_COUNTED) and frame.f_code.co_name != "<module>":
            self.modules.setdefault(name)


class Layer(nn.Module):
    """A layer of one bucket, of plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight).sum()


@dataclass
class World:
    """What the two workers have, and what runs beside them."""

    exchanges: Sequence[Exchange]
    beside: Sequence[Callable[[], Any]] = ()
    arenas: Sequence[Arena | None] = (None, None)
    trace: Trace = field(default_factory=Trace)


async def train(world: World) -> None:
    """Two workers train; the trace is on from the beginning of a backward to the end of the next forward."""
    trace = world.trace
    loop = asyncio.get_running_loop()

    def switch(on: bool) -> Callable[[], None]:
        return lambda: setattr(trace, "on", on)

    begun, ended = (threading.Barrier(len(WORKERS), switch(on), timeout=LONG_S) for on in (True, False))

    async def worker(rank: int) -> None:
        exchange, device, layer = world.exchanges[rank], CpuDevice(1), Layer()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6, momentum=0.9)
        replica = TorchReplica(layer, optimizer, device, allocate=allocate_in(world.arenas[rank]))
        replica.connect(exchange.bucket_ready)
        await exchange.start(replica)

        def forward(step: int) -> Tensor:
            replica.begin_step(step)
            loss: Tensor = layer(torch.full((NUMEL,), float(rank + step)))
            return loss

        def compute() -> None:
            """All steps, in the compute thread: while the trace is on, nothing of the package runs for the test's sake."""
            loop.call_soon_threadsafe(exchange.begin_step, 0)
            loss = forward(0)
            for step in range(WARM_UP + TRACED):
                replica.begin_backward(last=True)
                if step >= WARM_UP:
                    begun.wait()
                loss.backward()  # type: ignore[no-untyped-call]
                replica.end_backward()
                asyncio.run_coroutine_threadsafe(exchange.end_step(), loop).result(LONG_S)
                loss = forward(step + 1)
                if step >= WARM_UP:
                    ended.wait()
                asyncio.run_coroutine_threadsafe(begin(exchange, step + 1), loop).result(LONG_S)

        await device.run(compute)
        await exchange.settle()
        await exchange.stop()
        await device.close(LONG_S)

    async with asyncio.TaskGroup() as tasks:
        for serve in world.beside:
            tasks.create_task(serve())
        for rank in range(len(WORKERS)):
            tasks.create_task(worker(rank))


async def begin(exchange: Exchange, step: int) -> None:
    exchange.begin_step(step)


@contextlib.asynccontextmanager
async def over_tcp(peers: Sequence[str]) -> AsyncIterator[list[Endpoint]]:
    """Endpoints that know each other, over ZeroMQ and TCP."""
    settings = NetSettings(lost_s=LONG_S, probe_s=LONG_S, heartbeat_s=LONG_S, hello_s=0.02)
    nodes = [await open_zeromq(peer, settings=settings) for peer in peers]
    try:
        yield acquainted(nodes)
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def acquainted(nodes: Sequence[Any]) -> list[Endpoint]:
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.add_peer(other.peer, other.address)
    return list(nodes)


def group(endpoint: Endpoint, members: Sequence[str]) -> Group:
    return Group(endpoint, tuple(members), members.index(endpoint.peer), "group", timeout_s=LONG_S)


async def model_server(trace: Trace) -> None:
    """A group of two workers, and a model server."""
    async with over_tcp((*WORKERS, SERVER)) as (*workers, server):
        settings = [
            ModelServerSettings(0, position, (WORKERS,), (SERVER,), request_s=LONG_S, barrier_s=LONG_S)
            for position in range(len(WORKERS))
        ]
        exchanges = [ModelServerExchange(node, its) for node, its in zip(workers, settings, strict=True)]
        serving = ModelServer(server, ServerSettings(0, WORKERS, request_s=LONG_S, barrier_s=LONG_S))
        await train(World(exchanges, [serving.run], trace=trace))


async def gossip(trace: Trace) -> None:
    """Two groups of one worker."""
    async with over_tcp(WORKERS) as nodes:
        exchanges = [
            GossipExchange(
                node,
                FixedMembers(node, WORKERS, timeout_s=LONG_S),
                NetworkSums(group(node, [node.peer])),
                frozenset(WORKERS),
                GossipSettings(seed=1, timeout_s=LONG_S),
            )
            for node in nodes
        ]
        await train(World(exchanges, trace=trace))


async def host(trace: Trace) -> None:
    """All-reduce of two workers in the memory that they share; the endpoints serve the start only."""
    region, network = Arena.create(len(WORKERS), 16 << 20), MemoryNetwork()
    try:
        nodes = acquainted([network.endpoint(peer) for peer in WORKERS])
        arenas = [Arena.join(region.path, rank) for rank in range(len(WORKERS))]
        sums = [
            HostSums(
                group(node, WORKERS),
                ArenaMember(Team(arena, range(len(WORKERS)), rank, names=WORKERS, number=0, timeout_s=LONG_S)),
                None,
                slices=len(WORKERS),
                scale=0.5,
                in_place=True,
            )
            for rank, (node, arena) in enumerate(zip(nodes, arenas, strict=True))
        ]
        await train(World([AllReduceExchange(each, by_bucket=True) for each in sums], arenas=arenas, trace=trace))
        await asyncio.gather(*(node.close() for node in nodes))
    finally:
        region.close()


def modules_of(way: Callable[[Trace], Any]) -> list[str]:
    """The modules that a gradient passes, in the order of their first call.

    Which ones they are is always the same. Their order is not: threads and sockets are not equally fast each time."""
    trace = Trace()
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        asyncio.run(way(trace))
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    return [name.removeprefix("zmqtrain.") for name in trace.modules]


#: The ways, as docs/architecture.md calls them in the head of its table.
WAYS: Mapping[str, Callable[[Trace], Any]] = {"model server": model_server, "gossip": gossip, "one host": host}
HEAD = f"| module | what it does | {' | '.join(WAYS)} |"


def table(found: Mapping[str, Collection[str]], known: Mapping[str, str]) -> str:
    """The table of docs/architecture.md. ``known``: what each module does, in the table's order; modules that it lacks follow."""
    order = [*known, *(name for names in found.values() for name in names)]
    used = {name for names in found.values() for name in names}
    lines = [HEAD, "|---|---|" + ":-:|" * len(WAYS)]
    for name in dict.fromkeys(order):
        if name in used:
            marks = " | ".join("x" if name in found[way] else " " for way in WAYS)
            lines.append(f"| `{name}` | {known.get(name, '?')} | {marks} |")
    return "\n".join([*lines, f"| | number of modules | {' | '.join(str(len(found[way])) for way in WAYS)} |"])


def documented() -> tuple[str, dict[str, str]]:
    """The table as it stands in docs/architecture.md, and what it says about each module."""
    lines = DOCUMENT.read_text().splitlines()
    lines = list(takewhile(lambda line: line.startswith("|"), lines[lines.index(HEAD) :]))
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines[2:-1]]
    return "\n".join(lines), {name.strip("`"): text for name, text in cells}


if __name__ == "__main__":
    print(table({name: modules_of(way) for name, way in WAYS.items()}, documented()[1]))
