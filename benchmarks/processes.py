"""Processes of a benchmark: each with an endpoint over ZeroMQ, all knowing each other."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from zmqtrain.arena import Arena
from zmqtrain.errors import ZmqTrainError
from zmqtrain.launcher.namespaces import enter_namespace
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.loop import Dilation, run
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.value import ValuePayload

Work = TypeVar("Work")
Result = TypeVar("Result")

#: The processes must all be up, and be done, in this time.
PATIENCE_S = 180.0
#: How long one of two waits for the other between parts of a benchmark.
MEET_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs, if not simply here."""

    settings: NetSettings = field(default_factory=NetSettings)
    dilation: Dilation = field(default_factory=Dilation)
    namespace: str = ""
    """A network namespace of Linux."""
    arena: str = ""
    """Shared memory to join, as ``slot``; empty: none."""
    slot: int = 0


def run_processes(
    work: Sequence[tuple[PeerId, Work]],
    role: Callable[[Node, Work], Awaitable[Result]],
    places: Sequence[Place] | None = None,
    patience_s: float = PATIENCE_S,
) -> list[Result]:
    """Await ``role(node, work)`` for each peer in a process of its own; what each returned. ``places``: one for each.
    ``patience_s``: how long a process may take until it is up, and for its work.

    ``role`` must be importable, and the work and results plain values. Raises `ZmqTrainError` when a process fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([role.__module__])  # which imports torch once for all
    pipes = [context.Pipe() for _ in work]
    processes = [
        context.Process(target=_process, args=(peer, one, role, place, theirs), daemon=True)
        for (peer, one), (_, theirs), place in zip(work, pipes, places or [Place()] * len(work), strict=True)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        addresses = {peer: _hear(pipe, patience_s) for (peer, _), (pipe, _) in zip(work, pipes, strict=True)}
        for pipe, _ in pipes:
            pipe.send(addresses)
        results: list[Result] = [_hear(pipe, patience_s) for pipe, _ in pipes]
        for process in processes:
            process.join(PATIENCE_S)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _hear(pipe: Connection, patience_s: float) -> Any:
    """What a process says next. Raises where it ended instead, or says nothing."""
    try:
        if pipe.poll(patience_s):
            return pipe.recv()
    except EOFError:
        raise ZmqTrainError("a process of the benchmark ended early; its traceback stands above") from None
    raise ZmqTrainError(f"a process of the benchmark said nothing for {patience_s:g} s")


def _process(peer: PeerId, work: Work, role: Callable[[Node, Work], Awaitable[Result]], place: Place, pipe: Connection) -> None:
    if place.namespace:
        enter_namespace(place.namespace)
    arena = Arena.join(place.arena, place.slot) if place.arena else None
    run(_take_part(peer, work, role, replace(place.settings, arena=arena), pipe), dilation=place.dilation)


async def _take_part(
    peer: PeerId, work: Work, role: Callable[[Node, Work], Awaitable[Result]], settings: NetSettings, pipe: Connection
) -> None:
    from zmqtrain.net.zeromq import open_zeromq

    async with await open_zeromq(peer, token="bench", settings=settings) as node:
        pipe.send(node.address)
        addresses: dict[PeerId, str] = await asyncio.to_thread(pipe.recv)
        for other, address in addresses.items():
            node.add_peer(other, address)
        pipe.send(await role(node, work))


async def together(node: Node, other: PeerId, name: str) -> None:
    """Both of two processes are as far as this."""
    await node.send(other, ("together", name), ValuePayload(None))
    async with asyncio.timeout(MEET_S):
        await node.receive(other, ("together", name))
