"""Sessions without processes: every role a coroutine on the in-memory network, every worker's loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from zmqtrain.data.background import BackgroundThread
from zmqtrain.embed.core import Core
from zmqtrain.embed.own_run import open_run
from zmqtrain.embed.session import Session
from zmqtrain.net.loop import run as run_loop
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.schema import Topology

T = TypeVar("T")


def topology_of(**sections: Any) -> Topology:
    sections["job"] = {"timeout": 60.0, "oversubscribe": True, **sections.get("job", {})}
    sections["compute"] = {"device": "cpu", "threads": 1, "bucket_size": 512, **sections.get("compute", {})}
    return Topology.model_validate(sections)


def run_sessions(topology: Topology, program: Callable[[Session], T], warnings: list[str] | None = None) -> list[T]:
    """``program(session)`` on each worker of the topology; what it returns, by rank. Raises the first worker's error. ``warnings``
    gets those of the run."""
    backward = torch.autograd.backward
    try:
        with TemporaryDirectory() as folder:
            return run_loop(_run(topology, program, Path(folder, "checkpoints"), [] if warnings is None else warnings))
    finally:
        assert torch.autograd.backward is backward, "a session has not released its model"


async def _run(topology: Topology, program: Callable[[Session], T], folder: Path, warnings: list[str]) -> list[T]:
    def reported(peer: str, events: list[dict[str, Any]]) -> None:
        warnings.extend(event["values"]["text"] for event in events if event["kind"] == "warning")

    results: dict[int, T] = {}
    errors: list[BaseException] = []
    async with open_run(topology, network=MemoryNetwork(), checkpoints=folder, on_report=reported) as run:
        made = asyncio.Event()  # all sessions, each of which seeds torch, that all threads share
        waiting = len(run.placement.workers)

        async def worker(peer: str) -> None:
            nonlocal waiting
            async with run.context(peer) as context:
                core = Core(context)
                waiting -= 1
                if not waiting:
                    made.set()
                await made.wait()
                thread = BackgroundThread(peer)
                try:
                    result = await thread.submit(lambda: program(Session(core)))
                    await thread.submit(lambda: core.bridge.call(core.guard(core.finish()), "the end"))
                    results[context.role.index] = result
                finally:
                    await core.close(thread)

        async def role(peer: str) -> None:
            try:
                await (worker(peer) if peer.startswith("worker") else run.role(peer))
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                for task in tasks:
                    task.cancel()

        tasks = [asyncio.create_task(role(each.peer)) for each in run.placement.roles]
        await asyncio.wait(tasks)
        if errors:
            raise errors[0]
    return [results[rank] for rank in sorted(results)]
