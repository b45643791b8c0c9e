"""A whole run in one process: coordinator, collector, servers and workers as coroutines on the in-memory network."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain.arena import Arena, Region
from zmqtrain.errors import PeerLostError
from zmqtrain.events import EventValue
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run.assembly import Assembly
from zmqtrain.run.enter import enter, live_without_agent
from zmqtrain.topology.placement import RolePlacement, place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.base import Device
from zmqtrain.train.task import Task


class ListRecorder:
    """Keeps events and the names of spans."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.spans: list[tuple[str, str]] = []
        self.audited: list[dict[str, Any]] = []

    def event(self, kind: str, /, *, step: int | None = None, **values: EventValue) -> None:
        self.events.append({"kind": kind, "step": step, **values})

    def audit(self, what: str, /, **values: object) -> None:
        self.audited.append({"what": what, **values})

    def span(self, name: str, category: str, /, *, step: int | None = None) -> AbstractContextManager[object]:
        self.spans.append((name, category))
        return nullcontext()

    def add_span(
        self,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        *,
        step: int | None = None,
        values: Mapping[str, EventValue] | None = None,
    ) -> None:
        self.spans.append((name, category))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class Run:
    """What a run left behind."""

    def __init__(self) -> None:
        self.recorders: dict[str, ListRecorder] = defaultdict(ListRecorder)
        self.errors: dict[str, BaseException] = {}

    def losses(self, peer: str) -> list[float]:
        return [event["loss"] for event in self.recorders[peer].of("step")]

    def causes(self) -> list[BaseException]:
        """The errors but for those of roles that only heard of another's: which of several is the first to fail is open."""
        causes = [error for error in self.errors.values() if not isinstance(error, PeerLostError)]
        assert causes or not self.errors, self.errors
        return causes


def topology_of(**sections: Any) -> Topology:
    """Three or four buckets for `network_of`: each more is as many messages again, and most of the time of these tests.

    Divided models are compared with the ordinary one only where a test asks for it: it takes as long as twenty steps."""
    sections["job"] = {"timeout": 60.0, "oversubscribe": True, **sections.get("job", {})}
    sections["compute"] = {"device": "cpu", "threads": 1, "bucket_size": 512, **sections.get("compute", {})}
    sections["parallel"] = {"verify": False, **sections.get("parallel", {})}
    return Topology.model_validate(sections)


async def run(
    topology: Topology,
    task: Callable[[str], Task] | None,
    *,
    folder: Path | None = None,
    resume: Path | None = None,
    region: Region | None = None,
    make_device: Callable[[RolePlacement], Device] | None = None,
    meanwhile: Callable[[Endpoint, Run], Coroutine[Any, Any, None]] | None = None,
) -> Run:
    """Run the topology to its end. ``task(peer)`` makes a worker's task. A role's error is kept in ``Run.errors``.

    ``region``: memory that all roles share. ``meanwhile``: what the launcher does, with the coordinator's endpoint.
    """
    network, placement, timeouts = MemoryNetwork(), place(topology), topology.job.timeouts
    endpoint = network.endpoint(COORDINATOR)
    description = RunDescription(topology, placement, "", resume=None if resume is None else str(resume))
    assembly = Assembly(endpoint, description, checkpoints=folder, model=folder, agents=False)
    result = Run()
    peers = [each.peer for each in placement.roles]

    async def role(peer: str) -> None:
        own = network.endpoint(peer)
        arena = None if region is None else Arena.join(region.path, peers.index(peer))
        computes = not peer.startswith("server")
        try:
            recorder = result.recorders[peer]
            entering = enter(own, endpoint.address, timeouts, arena=arena, description=assembly.description, recorder=recorder)
            async with entering as (context, _):
                context = replace(context, make_device=make_device)
                await live_without_agent(context, task(peer) if task is not None and computes else None)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result.errors[peer] = error
        finally:
            await own.close()

    async with asyncio.TaskGroup() as tasks:
        background: list[asyncio.Task[Any]] = [tasks.create_task(assembly.run())]
        if meanwhile is not None:
            background.append(tasks.create_task(meanwhile(endpoint, result)))
        await asyncio.gather(*(role(r.peer) for r in placement.roles))
        for one in background:
            one.cancel()
    await endpoint.close()
    return result


def network_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def data_of(samples: int = 96, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


class Recipe:
    """Makes tasks, and keeps the models that were built."""

    def __init__(self, dtype: torch.dtype = torch.float64, **fields: Any) -> None:
        self.dtype, self.fields = dtype, fields
        self.models: dict[str, nn.Module] = {}

    def __call__(self, peer: str) -> Task:
        def model() -> nn.Module:
            self.models[peer] = built = self.fields.get("model", lambda: network_of(self.dtype))()
            return built

        fields: dict[str, Any] = {
            "loss": nn.functional.cross_entropy,
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
            "train_data": data_of(dtype=self.dtype),
            "eval_data": data_of(31, dtype=self.dtype),
            **self.fields,
            "model": model,
        }
        return Task(**fields)

    def parameters(self, peer: str) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1).double() for parameter in self.models[peer].parameters()])
