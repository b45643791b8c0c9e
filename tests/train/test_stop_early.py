"""All workers stop before the same step, whoever is ahead; and who goes on from there ends as if nothing had been."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.merged_fc.test_training import merged, recipe_of, whole
from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.errors import ConnectivityError, ProtocolError
from zmqtrain.membership.common_stop import StopPoint, stop_together
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.train.checkpoint.folder import find_checkpoints

SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "servers": {"kind": "model_server", "staleness": "sync", "shards": 2},
    "averaging": {"kind": "averaging", "every": 3},
}
APART: dict[str, dict[str, Any]] = {
    "async": {"kind": "model_server", "staleness": "async", "shards": 2},
    "bound": {"kind": "model_server", "staleness": {"bound": 1}},
    "gossip": {"kind": "gossip"},
}
WORKERS = [f"worker/{rank}" for rank in range(4)]


class Asker:
    """Asks all to stop when worker 0 has done so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.stopped: int | None = None

    async def __call__(self, endpoint: Endpoint, so_far: Run) -> None:
        while len(so_far.losses("worker/0")) < self.after:  # noqa: ASYNC110 - the recorder has no event
            await asyncio.sleep(0)
        self.stopped = await stop_together(endpoint, WORKERS, timeout_s=20.0)


def topology(exchange: dict[str, Any], **job: Any) -> Any:
    return topology_of(
        job={"steps": 10, "elastic": False, **job}, compute={"groups": 2, "group_size": 2, "batch_size": 12}, exchange=exchange
    )


@pytest.mark.parametrize(("kind", "every"), [(kind, number % 2) for number, kind in enumerate(SYNCHRONOUS)])
async def test_a_run_that_stopped_early_goes_on_to_the_same_bits(kind: str, every: int, tmp_path: Path) -> None:
    """Also where the checkpoint of that step is written anyway."""
    shape = topology(SYNCHRONOUS[kind], checkpoint_every=every)
    whole, again = Recipe(), Recipe()
    first = await run(shape, whole, folder=tmp_path / "whole")
    ask = Asker(after=3)
    stopped = await run(shape, Recipe(), folder=tmp_path / "stopped", meanwhile=ask)
    assert not first.errors
    assert not stopped.errors, stopped.errors
    step = ask.stopped
    assert step is not None
    assert 3 <= step < 10
    for peer in WORKERS:
        assert len(stopped.losses(peer)) == step
        assert stopped.recorders[peer].of("stopped") == [{"kind": "stopped", "step": step, "kept": True}]
        assert not stopped.recorders[peer].of("finish")
    resumed = await run(shape, again, folder=tmp_path / "again", resume=tmp_path / "stopped")
    assert not resumed.errors
    for peer in WORKERS:
        assert torch.equal(whole.parameters(peer), again.parameters(peer))
        assert first.losses(peer)[step:] == resumed.losses(peer)


@pytest.mark.parametrize("kind", APART)
async def test_groups_that_are_not_in_step_stop_at_the_same_one(kind: str, tmp_path: Path) -> None:
    ask = Asker(after=3)
    result = await run(topology(APART[kind]), Recipe(), folder=tmp_path, meanwhile=ask)
    assert not result.errors, result.errors
    assert {len(result.losses(peer)) for peer in WORKERS} == {ask.stopped}
    (kept,) = find_checkpoints(tmp_path)
    assert kept.name == f"step-{ask.stopped:08d}"
    resumed = await run(topology(APART[kind]), Recipe(), folder=tmp_path / "again", resume=tmp_path)
    assert not resumed.errors
    assert {len(resumed.losses(peer)) for peer in WORKERS} == {10 - (ask.stopped or 0)}


async def test_a_checkpoint_that_the_disk_refuses_is_not_said_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where checkpoints should lie")
    stopped = await run(topology(SYNCHRONOUS["allreduce"]), Recipe(), folder=tmp_path / "file", meanwhile=Asker(after=3))
    assert not stopped.errors, stopped.errors
    assert [event["kept"] for peer in WORKERS for event in stopped.recorders[peer].of("stopped")] == [False] * 4


async def test_merged_layers_are_kept_as_they_are_then(tmp_path: Path) -> None:
    shape = merged(2, 2, 12, job={"steps": 10})
    ask = Asker(after=3)
    stopped = await run(shape, recipe_of(), folder=tmp_path / "stopped", meanwhile=ask)
    assert not stopped.errors, stopped.errors
    first, again = recipe_of(), recipe_of()
    assert not (await run(shape, first)).errors
    resumed = await run(shape, again, folder=tmp_path / "again", resume=tmp_path / "stopped")
    assert not resumed.errors, resumed.errors
    assert len(resumed.losses("worker/0")) == 10 - (ask.stopped or 0) < 10
    assert torch.allclose(whole(first), whole(again), rtol=1e-12, atol=1e-14)  # groups add up in the order in which they come


async def test_before_the_first_step_there_is_nothing_to_keep(tmp_path: Path) -> None:
    ask = Asker(after=0)
    result = await run(topology(SYNCHRONOUS["allreduce"]), Recipe(), folder=tmp_path, meanwhile=ask)
    assert not result.errors
    assert ask.stopped in (0, 1)
    assert len(find_checkpoints(tmp_path)) == ask.stopped


async def test_who_is_about_to_end_is_not_stopped(tmp_path: Path) -> None:
    ask = Asker(after=10)
    result = await run(topology(SYNCHRONOUS["allreduce"]), Recipe(), folder=tmp_path, meanwhile=ask)
    assert not result.errors
    assert ask.stopped is None
    assert all(result.recorders[peer].of("finish") for peer in WORKERS)


class Two:
    """Two workers' stop points, and the coordinator's endpoint."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.coordinator, self.endpoints = network.endpoint("coordinator"), [network.endpoint(peer) for peer in WORKERS[:2]]
        for endpoint in self.endpoints:
            self.coordinator.add_peer(endpoint.peer, endpoint.address)
            endpoint.add_peer("coordinator", self.coordinator.address)
        self.points = [StopPoint(endpoint, timeout_s=0.2) for endpoint in self.endpoints]

    async def ask(self) -> int | None:
        return await stop_together(self.coordinator, WORKERS[:2], timeout_s=0.2)

    async def close(self) -> None:
        for endpoint in (self.coordinator, *self.endpoints):
            await endpoint.close()


async def test_the_furthest_decides_and_nobody_passes_it() -> None:
    two = Two()
    ahead, behind = two.points
    asking = asyncio.create_task(two.ask())
    ahead.open(0, None)
    behind.open(0, 100)
    for step in range(5):
        assert not await ahead.here(step)
    assert not await behind.here(0)
    assert await asking == 5
    assert await ahead.here(5)
    for step in range(1, 5):
        assert not await behind.here(step)
    assert await behind.here(5)
    await two.close()


async def test_training_that_would_end_sooner_goes_on_to_the_common_step() -> None:
    """Unless it had ended before it was asked: then nobody stops for it."""
    two = Two()
    for point in two.points:
        point.open(0, None)
        assert not await point.here(0)
    assert await two.ask() == 1
    assert not await two.points[0].end()
    await two.close()
    two = Two()
    for point in two.points:
        point.open(0, None)
    assert await two.points[0].end()
    assert await two.ask() is None
    assert not await two.points[1].here(0)
    await two.close()


async def test_one_that_does_not_answer_stops_nobody() -> None:
    two = Two()
    two.points[0].open(3, None)
    with pytest.raises(ConnectivityError, match="worker/1"):
        await two.ask()
    assert not await two.points[0].here(3)
    await two.close()


async def test_only_the_coordinator_may_ask() -> None:
    two = Two()
    two.points[0].open(0, None)
    two.endpoints[1].add_peer(WORKERS[0], two.endpoints[0].address)
    with pytest.raises(ProtocolError, match="only the coordinator may"):
        await two.endpoints[1].request(WORKERS[0], "stop.ask", timeout=1.0)
    await two.close()
