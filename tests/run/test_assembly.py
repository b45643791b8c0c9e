"""What a run is made of on the coordinator's side, in the worlds that used to have less of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.world import Recipe, run, topology_of
from zmqtrain.embed.own_run import open_run
from zmqtrain.membership.description import RunDescription, fetch_description
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run.assembly import Assembly
from zmqtrain.testing import virtual_time
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

GOSSIP = {
    "job": {"name": "own", "steps": 400, "timeout": "5 s", "oversubscribe": True},
    "compute": {"groups": 3, "device": "modelled", "profile": "lenet"},
    "exchange": {"kind": "gossip"},
    "simulation": {"payload": "phantom"},
}


class Heard:
    """What happens to a run, and how far its workers are."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.finished: set[str] = set()
        self.last: dict[str, int] = {}
        self.third = asyncio.Event()

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append((kind, values))

    def on_report(self, peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step":
                self.last[peer] = event["step"]
            if event["kind"] == "step" and event["step"] >= 2 and peer == "worker/2":
                self.third.set()
            elif event["kind"] == "finish":
                self.finished.add(peer)


async def losing_a_worker(folder: Path, **job: Any) -> Heard:
    """A run of gossip whose third worker is lost."""
    heard = Heard()
    opened = open_run(
        Topology.from_dict({**GOSSIP, "job": {**GOSSIP["job"], **job}}),
        network=MemoryNetwork(),
        checkpoints=folder,
        on_report=heard.on_report,
        on_event=heard.on_event,
    )
    async with opened as run, asyncio.TaskGroup() as tasks:
        for peer in ("worker/0", "worker/1"):
            tasks.create_task(run.role(peer))
        lost = tasks.create_task(run.role("worker/2"))
        await heard.third.wait()
        lost.cancel()
    return heard


@virtual_time()
async def test_an_embedded_run_goes_on_without_a_worker_that_is_lost(tmp_path: Path) -> None:
    """Gossip is elastic wherever it runs: also where nobody but the coordinator sees that a worker has gone."""
    heard = await losing_a_worker(tmp_path)
    assert heard.finished == {"worker/0", "worker/1"}
    assert [values["peer"] for kind, values in heard.events if kind == "lost"] == ["worker/2"]


@virtual_time()
@pytest.mark.parametrize(("least", "wait_s"), [(2, 0.0), (3, 0.0), (3, 0.05), (3, 600.0)])
async def test_a_run_with_too_few_workers_stops_at_a_common_step(tmp_path: Path, least: int, wait_s: float) -> None:
    """At once, or when the others have trained on alone for a while; not if they have done all steps meanwhile."""
    heard = await losing_a_worker(tmp_path, min_workers=least, min_workers_wait=wait_s)
    steps = {heard.last["worker/0"] + 1, heard.last["worker/1"] + 1}
    if least == 3 and wait_s < 600:
        assert len(steps) == 1, "a common step"
        assert steps != {400}
    else:
        assert steps == {400}


async def test_who_opens_a_run_hears_of_its_checkpoints(tmp_path: Path) -> None:
    heard = Heard()
    topology = topology_of(job={"steps": 4, "checkpoint_every": 2}, exchange={"kind": "allreduce"})
    opened = open_run(topology, network=MemoryNetwork(), checkpoints=tmp_path / "checkpoints", on_event=heard.on_event)
    async with opened as run:
        await run.role("worker/0", task=Recipe()("worker/0"))
    assert [values["step"] for kind, values in heard.events if kind == "checkpoint complete"] == [2, 4]


async def test_a_run_without_a_folder_writes_nothing_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last good step would be kept: after a loss that is no number."""
    monkeypatch.chdir(tmp_path)
    steps = iter(range(100))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = torch.nn.functional.cross_entropy(output, target)
        return value * float("nan") if next(steps) >= 2 else value

    topology = topology_of(job={"steps": 4}, exchange={"kind": "allreduce"})
    result = await run(topology, Recipe(loss=loss))
    assert "No checkpoint of the last good step could be kept" in str(result.errors["worker/0"])
    assert not os.listdir(tmp_path)


async def test_roles_are_told_that_nothing_is_kept() -> None:
    network, topology = MemoryNetwork(), topology_of(job={"checkpoint_every": 5})
    endpoint = network.endpoint(COORDINATOR)
    Assembly(endpoint, RunDescription(topology, place(topology), ""), checkpoints=None, agents=False)
    role = network.endpoint("worker/0")
    role.add_peer(COORDINATOR, endpoint.address)
    told = await fetch_description(role, timeout=5.0)
    assert (topology.job.checkpoint_every, told.topology.job.checkpoint_every) == (5, 0)
    for each in (role, endpoint):
        await each.close()
