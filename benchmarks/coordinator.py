"""``python -m benchmarks coordinator``: what the coordinator takes for hundreds of hosts.

Agents and workers are coroutines of four other processes, each with its own endpoint over TCP, that join, send heartbeats and
events, and meet at barriers. The coordinator has a process to itself, whose processor time is measured; wall-clock times include
what the others do, which share the machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.case import Case, case_of
from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.client import Membership
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.environment import COORDINATOR, net_settings
from zmqtrain.net.loop import run
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.observe.recorder import RunRecorder
from zmqtrain.run.assembly import coordinator_settings
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts

HOSTS = (100, 400, 1000)
PROCESSES, BARRIERS = 4, 5
#: How long the run is watched, and how long a step takes of which each worker posts an event.
STEADY_S, STEP_S = 10.0, 0.5
#: How long after the last one has joined that begins.
SETTLE_S = 3.0
#: How many times as long as usual everything may take.
PATIENCE = 10
_TOKEN = "token of a benchmark"


def bench_coordinator(hosts: Sequence[int] = HOSTS) -> Iterator[Case]:
    """A worker and an agent on each host."""
    context = multiprocessing.get_context("spawn")
    for count in hosts:
        mine, theirs = context.Pipe()
        process = context.Process(target=_coordinate, args=(count, theirs))
        process.start()
        theirs.close()
        found: Mapping[str, float] = mine.recv()
        process.join()
        name = f"{count} hosts, "
        yield case_of("coordinator", name + "all have joined after", found["joined_s"], "s", digits=2)
        yield case_of("coordinator", name + "its processor time until then", found["joined_cpu_s"], "s", digits=2)
        yield case_of("coordinator", name + "share of a processor in a steady run", 100 * found["steady"], "%", digits=1)
        yield case_of("coordinator", name + "for each host and second", 1e6 * found["steady"] / count, "us", digits=0)
        yield case_of("coordinator", name + "requests in a second", found["messages"], "", digits=0)
        yield case_of("coordinator", name + "a barrier of all workers", 1000 * found["barrier_s"], "ms", digits=0)
        yield case_of("coordinator", name + "its processor time for it", 1000 * found["barrier_cpu_s"], "ms", digits=0)


def _topology(hosts: int) -> Topology:
    return Topology.from_dict(
        {
            "job": {},
            "hosts": [{"name": f"h[1-{hosts}]", "address": "127.0.0.1", "slots": 1}],
            "compute": {"groups": hosts, "batch_size": 1, "device": "modelled", "profile": "lenet"},
            "exchange": {"kind": "gossip"},
        }
    )


def _patient(timeouts: Timeouts) -> Timeouts:
    """The same intervals, but more patience: all these processes share one machine."""
    waits = {name: PATIENCE * getattr(timeouts, name) for name in ("flush_s", "lost_s", "request_s", "join_s", "barrier_s")}
    return replace(timeouts, **waits)


def _patiently(settings: NetSettings) -> NetSettings:
    return replace(
        settings, greet_s=PATIENCE * settings.greet_s, lost_s=PATIENCE * settings.lost_s, flush_s=PATIENCE * settings.flush_s
    )


async def _open(peer: str, topology: Topology) -> Node:
    settings = net_settings(topology.job.timeouts, _TOKEN, host="127.0.0.1", members=place(topology).members)
    return await open_zeromq(peer, settings=_patiently(settings))


def _open_many_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _coordinate(hosts: int, told: Connection) -> None:
    _open_many_files()
    told.send(run(_coordinator(hosts)))


async def _coordinator(hosts: int) -> dict[str, float]:
    topology = _topology(hosts)
    timeouts = _patient(topology.job.timeouts)
    timeouts = replace(timeouts, silent_s=PATIENCE * timeouts.silent_s)
    endpoint = await open_zeromq(COORDINATOR, settings=_patiently(coordinator_settings(topology, _TOKEN, encrypted=False)))
    coordinator = Coordinator(endpoint, place(topology), timeouts, elastic=True, on_report=lambda _peer, _events: None)
    life = asyncio.create_task(coordinator.run())
    context = multiprocessing.get_context("spawn")
    pipes = []
    began, used = time.monotonic(), time.process_time()
    for number in range(PROCESSES):
        mine, theirs = context.Pipe()
        pipes.append(mine)
        ranks = range(number * hosts // PROCESSES, (number + 1) * hosts // PROCESSES)
        context.Process(target=_be_hosts, args=(ranks, hosts, endpoint.address, theirs), daemon=True).start()
    for pipe in pipes:
        await asyncio.to_thread(pipe.recv)
    found = {"joined_s": time.monotonic() - began, "joined_cpu_s": time.process_time() - used}
    await asyncio.sleep(SETTLE_S)
    began, used, before = time.monotonic(), time.process_time(), _arrived(endpoint)
    await asyncio.sleep(STEADY_S)
    passed_s = time.monotonic() - began
    found["steady"] = (time.process_time() - used) / passed_s
    found["messages"] = (_arrived(endpoint) - before) / passed_s
    used = time.process_time()
    for pipe in pipes:
        pipe.send("meet")
    found["barrier_s"] = statistics.median([max(await asyncio.to_thread(pipe.recv)) for pipe in pipes])
    found["barrier_cpu_s"] = (time.process_time() - used) / BARRIERS
    for pipe in pipes:
        pipe.send("end")
    outcome = await life
    for pipe in pipes:
        await asyncio.to_thread(pipe.recv)
    assert outcome.status == "done", outcome
    await endpoint.close()
    return found


def _arrived(endpoint: Node) -> int:
    return endpoint.statistics()["messages_received"]


def _be_hosts(ranks: Sequence[int], hosts: int, address: str, pipe: Connection) -> None:
    _open_many_files()
    run(_hosts(ranks, hosts, address, pipe))


async def _hosts(ranks: Sequence[int], hosts: int, address: str, pipe: Connection) -> None:
    topology, loop = _topology(hosts), asyncio.get_running_loop()
    timeouts, meet, joined = _patient(topology.job.timeouts), asyncio.Event(), 0
    end = asyncio.Event()
    took: list[float] = []

    def heard() -> None:
        if pipe.recv() == "meet":
            meet.set()
        else:
            loop.remove_reader(pipe.fileno())
            end.set()

    loop.add_reader(pipe.fileno(), heard)

    async def host(rank: int) -> None:
        nonlocal joined
        agent, worker = await _open(f"agent/h{rank + 1}", topology), await _open(f"worker/{rank}", topology)
        link = await AgentLink.join(agent, coordinator_address=address, timeouts=timeouts)
        link.started(worker.peer)
        beats = asyncio.create_task(link.run())
        membership = await Membership.join(worker, coordinator_address=address, timeouts=timeouts)
        recorder = RunRecorder(membership.report, roles=hosts)
        posts = asyncio.create_task(recorder.run())
        steps = asyncio.create_task(_train(recorder))
        joined += 1
        if joined == len(ranks):
            pipe.send("joined")
        await meet.wait()
        for number in range(BARRIERS):
            start = time.monotonic()
            await membership.barrier(f"{number}")
            took.append(time.monotonic() - start)
        if len(took) == BARRIERS * len(ranks):
            pipe.send([statistics.median(took)])
        await end.wait()
        await _end(steps, posts)
        await recorder.close()
        await membership.leave()
        await link.exited(worker.peer, 0)
        await _end(beats)
        await link.leave()
        await worker.close()
        await agent.close()

    async with asyncio.TaskGroup() as tasks:
        for rank in ranks:
            tasks.create_task(host(rank))
    pipe.send("ended")


async def _train(recorder: RunRecorder) -> None:
    step = 0
    while True:
        recorder.event("step", step=step, loss=0.5, samples=64)
        step += 1
        await asyncio.sleep(STEP_S)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
