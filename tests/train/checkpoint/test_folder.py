"""Checkpoints: readable by anybody, whole or not there, and refused where they do not fit."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.train.world import Recipe, network_of, run, topology_of
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import COMMITTED, SAVE, fetch_part, pack_manifest, send_nothing, send_part, wait_committed
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.succession import Records
from zmqtrain.train.checkpoint.collector import MOST_INCOMPLETE, CheckpointCollector
from zmqtrain.train.checkpoint.folder import (
    META,
    Checkpoint,
    CheckpointWriter,
    RunShape,
    find_checkpoints,
    find_latest,
    prune,
    read_safetensors,
)
from zmqtrain.wire.tensor import TensorPayload

SHAPE = RunShape("allreduce", 1, 1, 0)
TENSORS = {
    "weights": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "step": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4, dtype=torch.float64),
    "flags": torch.tensor([True, False]),
}


def payloads(tensors: dict[str, torch.Tensor]) -> dict[str, TensorPayload]:
    return {name: TensorPayload.of(tensor) for name, tensor in tensors.items()}


def write(folder: Path, step: int = 4, shape: RunShape = SHAPE) -> Path:
    writer = CheckpointWriter(folder, step, shape)
    for name in shape.parts():
        part = writer.part(name, [(n, p.dtype, p.shape) for n, p in payloads(TENSORS).items()], {"step": step, "part": name})
        for payload in payloads(TENSORS).values():
            part.write(payload.frames(), payload.dtype, payload.numel)
        writer.add(part.close())
    assert folder / f"step-{step:08d}" not in find_checkpoints(folder)
    return writer.commit()


def test_what_is_written_is_read_again_also_by_the_safetensors_library(tmp_path: Path) -> None:
    folder = write(tmp_path)
    theirs = load_file(folder / "model.safetensors")
    ours, sidecar = Checkpoint(folder).part("worker-0")
    assert sidecar == {"step": 4, "part": "worker-0"}
    assert list(ours) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(ours[name].tensor, tensor)
        assert torch.equal(theirs[name], tensor)
        assert ours[name].tensor.dtype == theirs[name].dtype == tensor.dtype


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"by": "somebody"})
    ours = read_safetensors(tmp_path / "theirs.safetensors")
    assert all(torch.equal(ours[name].tensor, tensor) for name, tensor in TENSORS.items())


def test_the_latest_complete_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    for step in (4, 8, 100000012):
        write(tmp_path / "run-000" / "checkpoints", step)
    checkpoints = tmp_path / "run-000" / "checkpoints"
    (checkpoints / ".step-00000016.partial").mkdir()
    (checkpoints / "step-00000020").mkdir()  # without meta: somebody's copy that did not finish
    for start in (tmp_path, tmp_path / "run-000", checkpoints, checkpoints / "step-100000012"):
        assert find_latest(start) == checkpoints / "step-100000012"
    assert [path.name for path in prune(checkpoints, 2)] == ["step-00000004"]
    assert [path.name for path in find_checkpoints(checkpoints)] == ["step-00000008", "step-100000012"]
    with pytest.raises(CheckpointError, match="no run directory or checkpoint"):
        find_latest(tmp_path / "other")
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*: a run keeps none before its first step"):
        find_latest(tmp_path / "other")


@pytest.mark.parametrize("name", ["model.safetensors", "worker-0.msgpack", META])
@pytest.mark.parametrize("how", ["shorter", "flipped", "gone"])
def test_a_torn_checkpoint_is_refused(name: str, how: str, tmp_path: Path) -> None:
    path = write(tmp_path) / name
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if how == "shorter" else bytes([content[0] ^ 255]) + content[1:])
    with pytest.raises(CheckpointError, match=name if how == "gone" or name != META else "checkpoint"):
        Checkpoint(path.parent)


def test_a_file_of_torch_save_is_named_as_such(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is a file of torch\.save"):
        read_safetensors(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "junk", [b"", b"1234567", b"\xff" * 64, (8).to_bytes(8, "little") + b"{}      x", b"\x02" + bytes(7) + b"[]"]
)
def test_junk_is_no_safetensors_file(junk: bytes, tmp_path: Path) -> None:
    path = tmp_path / "junk.safetensors"
    path.write_bytes(junk)
    if junk.endswith(b"x"):  # no tensors, and a byte too many that nobody asks for
        assert read_safetensors(path) == {}
    else:
        with pytest.raises(CheckpointError, match=r"junk\.safetensors"):
            read_safetensors(path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (RunShape("model_server", 1, 1, 0), r"\[exchange\] kind"),
        (RunShape("allreduce", 2, 1, 0), r"\[compute\] groups"),
        (RunShape("allreduce", 1, 3, 0, 1), r"\[compute\] group_size = 1, but this run has 3"),
        (RunShape("allreduce", 1, 1, 2), r"\[exchange\] shards"),
        (RunShape("allreduce", 1, 1, 0, 1), r"merged_fc = false, but this run has true"),
    ],
)
async def test_a_checkpoint_of_another_shape_is_refused_before_the_run(other: RunShape, said: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path))
    endpoint = MemoryNetwork().endpoint("coordinator")
    with pytest.raises(CheckpointError, match=said):
        CheckpointCollector(endpoint, tmp_path, other, resume=checkpoint)
    await endpoint.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model[2:], "this model does not"),
        (lambda model: model[:4].append(nn.Linear(9, 4)), r"as float64 \[3.*\], but here it is float64 \[4.*\]"),
    ],
)
async def test_a_checkpoint_of_another_model_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    await run(topology_of(job={"steps": 2, "checkpoint_every": 2}, compute={"batch_size": 12}), Recipe(), folder=tmp_path)
    other = Recipe(model=lambda: change(network_of()).double())
    result = await run(
        topology_of(job={"steps": 3}, compute={"batch_size": 12}), other, folder=tmp_path, resume=tmp_path / "step-00000002"
    )
    with pytest.raises(CheckpointError, match=f"{said}: it belongs to another model"):
        raise result.errors["worker/0"]


async def test_parts_come_in_from_all_and_a_checkpoint_exists_when_they_are_complete(tmp_path: Path) -> None:
    network, shape = MemoryNetwork(), RunShape("allreduce", 1, 2, 0)
    coordinator, one, two = (network.endpoint(peer) for peer in ("coordinator", "worker/0", "worker/1"))
    for worker in (one, two):
        worker.add_peer("coordinator", coordinator.address)
        coordinator.add_peer(worker.peer, worker.address)
    committed: list[int] = []
    told: list[tuple[str, Any]] = []

    def tell(kind: str, values: dict[str, Any]) -> None:
        told.append((kind, values["step"]))
        if kind == "checkpoint complete":
            committed.append(values["step"])

    collector = CheckpointCollector(coordinator, tmp_path, shape, keep=1, on_event=tell)
    running = asyncio.create_task(collector.run())
    values: dict[str, Any] = {"list": [1, 2.5, None, "text", b"bytes"], "table": {"a": True}}
    try:
        for step in (5, 9):
            values["step"] = step
            for name in ("model", "group-0", "worker-0"):
                await send_part(one, step, name, payloads(TENSORS), values, timeout_s=5)
            assert committed == [5] * (step > 5)
            waiting = asyncio.create_task(wait_committed(one, step, timeout_s=5))
            await send_part(two, step, "worker-1", {}, {}, timeout_s=5)
            assert committed[-1] == step  # whoever brings the last part may end the run
            await waiting
        assert committed == [5, 9]
        assert os.listdir(tmp_path) == ["step-00000009"]
        with pytest.raises(CheckpointError, match="a checkpoint cannot hold"):
            await send_part(one, 10, "model", {"c": TensorPayload.of(np.zeros(2, np.complex128))}, {}, timeout_s=5)
        assert await fetch_part(one, "worker-0", timeout_s=5) is None
        with pytest.raises(CheckpointError, match="a checkpoint cannot hold"):
            await one.request("coordinator", COMMITTED, 10, timeout=5)
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert os.listdir(tmp_path) == ["step-00000009"]  # nothing half-written stays
    assert told == [("checkpoint complete", 5), ("checkpoint complete", 9), ("checkpoint failed", 10)]

    resumed = CheckpointCollector(coordinator, tmp_path, shape, resume=Checkpoint(tmp_path / "step-00000009"))
    running = asyncio.create_task(resumed.run())
    await asyncio.sleep(0)
    try:
        into = torch.zeros(2, 3)
        part = await fetch_part(one, "worker-0", timeout_s=5, into={"weights": TensorPayload.of(into)})
        assert part is not None
        assert part.step == 9
        assert part.sidecar == values
        assert torch.equal(into, TENSORS["weights"])
        assert torch.equal(part.tensors["half"].tensor, TENSORS["half"])  # type: ignore[attr-defined]
        with pytest.raises(CheckpointError, match="another model"):
            await fetch_part(two, "worker-0", timeout_s=5, into={"weights": TensorPayload.of(torch.zeros(7))})
        with pytest.raises(CheckpointError, match="worker-7"):
            await fetch_part(one, "worker-7", timeout_s=5)
    finally:
        running.cancel()
        await asyncio.wait({running})
        for endpoint in (one, two, coordinator):
            await endpoint.close()


class Collecting:
    """A collector, and roles that send their parts to it."""

    def __init__(self, folder: Path, shape: RunShape, **how: Any) -> None:
        self.network = MemoryNetwork()
        self.coordinator = self.network.endpoint("coordinator")
        self.told: list[tuple[str, int, str]] = []
        self.collector = CheckpointCollector(self.coordinator, folder, shape, on_event=self._tell, **how)
        self.endpoints: dict[str, Any] = {}

    def _tell(self, kind: str, values: dict[str, Any]) -> None:
        self.told.append((kind, values["step"], values.get("reason", "")))

    def of(self, peer: str) -> Any:
        if peer not in self.endpoints:
            endpoint = self.endpoints[peer] = self.network.endpoint(peer)
            endpoint.add_peer("coordinator", self.coordinator.address)
            self.coordinator.add_peer(peer, endpoint.address)
        return self.endpoints[peer]

    async def send(self, peer: str, step: int, *names: str, members: list[int] | None = None) -> None:
        sidecar: dict[str, Any] = {"step": step} if members is None else {"step": step, "members": members}
        for name in names:
            await send_part(self.of(peer), step, name, payloads(TENSORS), sidecar, timeout_s=5)

    async def __aenter__(self) -> Collecting:
        self._running = asyncio.create_task(self.collector.run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._running.cancel()
        await asyncio.wait({self._running})
        for endpoint in (*self.endpoints.values(), self.coordinator):
            await endpoint.close()


async def test_a_server_that_holds_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with Collecting(tmp_path, RunShape("model_server", 1, 1, 2)) as world:
        await world.send("worker/0", 3, "model", "worker-0")
        await world.send("server/0", 3, "server-0")
        assert world.told == []
        await send_nothing(world.of("server/1"), "server-1", {"versions": {}}, timeout_s=5)  # also if it is late
        await wait_committed(world.of("worker/0"), 3, timeout_s=5)
        await world.send("worker/0", 4, "model", "worker-0")
        await world.send("server/0", 4, "server-0")
        await wait_committed(world.of("worker/0"), 4, timeout_s=5)
    assert Checkpoint(tmp_path / "step-00000004").part("server-1") == ({}, {"versions": {}, "step": 4})


async def test_who_is_lost_is_not_waited_for_where_the_others_go_on(tmp_path: Path) -> None:
    here = {"worker/0", "worker/1", "worker/2"}
    async with Collecting(tmp_path, RunShape("gossip", 3, 1, 0), members=lambda: here) as world:
        await world.send("worker/0", 5, "model", "group-0", "worker-0", members=[0, 1, 2])
        await world.send("worker/2", 5, "group-2", members=[0, 1, 2])  # and half of its parts
        await world.send("worker/1", 5, "group-1", "worker-1", members=[0, 1, 2])
        assert world.told == []
        here.discard("worker/2")
        await world.of("worker/2").close()
        world.coordinator.forget("worker/2", "killed")
        await wait_committed(world.of("worker/0"), 5, timeout_s=5)
        # Who trains the next step says that there are two; one is enough to know.
        await world.send("worker/0", 6, "model", "group-0", "worker-0", members=[0, 1])
        await world.send("worker/1", 6, "group-1", "worker-1", members=[0, 1, 2])
        await wait_committed(world.of("worker/0"), 6, timeout_s=5)
    for step in (5, 6):
        checkpoint = Checkpoint(tmp_path / f"step-0000000{step}")
        checkpoint.require(RunShape("gossip", 3, 1, 0))
        assert [checkpoint.stands_in(f"worker-{rank}") for rank in range(3)] == [None, None, 1]
        checkpoint.shape = replace(checkpoint.shape, kind="model_server", group_size=3, groups=1)
        with pytest.raises(CheckpointError, match="lacks the parts of lost workers"):
            checkpoint.require(checkpoint.shape)


def test_a_checkpoint_that_takes_too_long_is_told_and_may_be_complete_still(tmp_path: Path) -> None:
    async def run() -> None:
        async with Collecting(tmp_path, RunShape("gossip", 2, 1, 0), patience_s=60.0) as world:
            await world.send("worker/0", 1, "model", "group-0", "worker-0")
            await asyncio.sleep(61)
            late = "checkpoint 1 is not complete after 60 s; missing: group-1, worker-1"
            assert world.told == [("checkpoint late", 1, late)]
            await world.send("worker/1", 1, "group-1", "worker-1")
            assert world.told[1:] == [("checkpoint complete", 1, "")]
            await world.send("worker/0", 2, "model", "group-0", "worker-0")
            await world.send("worker/0", 3, "model", "group-0", "worker-0")
            await world.send("worker/1", 3, "group-1", "worker-1")
            with pytest.raises(CheckpointError, match="checkpoint 2 is abandoned: checkpoint 3, a later one, is already complete"):
                await wait_committed(world.of("worker/0"), 2, timeout_s=5)
            await world.send("worker/0", 4, "model")
        (*_, last) = world.told
        assert last[:2] == ("checkpoint failed", 4)
        assert "the run ended before it was complete; missing: group-0, group-1, worker-0, worker-1" in last[2]

    run_virtual(run(), seed=1, limit_s=600)


async def test_groups_too_far_apart_lose_incomplete_checkpoints_but_not_the_oldest(tmp_path: Path) -> None:
    network, shape = MemoryNetwork(), RunShape("model_server", 2, 1, 0)
    coordinator, one = network.endpoint("coordinator"), network.endpoint("worker/0")
    one.add_peer("coordinator", coordinator.address)
    coordinator.add_peer("worker/0", one.address)
    collector = CheckpointCollector(coordinator, tmp_path, shape)
    running = asyncio.create_task(collector.run())
    for step in range(1, MOST_INCOMPLETE + 2):
        await send_part(one, step, "worker-0", payloads(TENSORS), {}, timeout_s=5)
    await send_part(one, 2, "model", payloads(TENSORS), {}, timeout_s=5)  # in vain, but nobody is held up
    with pytest.raises(CheckpointError, match="checkpoint 2 is abandoned"):
        await wait_committed(one, 2, timeout_s=5)
    for name in ("model", "worker-1"):
        await send_part(one, 1, name, {}, {}, timeout_s=5)
    await wait_committed(one, 1, timeout_s=5)
    running.cancel()
    await asyncio.wait({running})
    assert os.listdir(tmp_path) == ["step-00000001"]
    await one.close()
    await coordinator.close()


async def test_workers_on_another_grid_write_the_checkpoint_that_others_had_begun(tmp_path: Path) -> None:
    """Two of four had sent their parts when one was lost, and part of one is still on its way."""
    network, shape = MemoryNetwork(), RunShape("allreduce", 1, 4, 0)
    coordinator, one, two = (network.endpoint(peer) for peer in ("coordinator", "worker/0", "worker/3"))
    for worker in (one, two):
        worker.add_peer("coordinator", coordinator.address)
    collector = CheckpointCollector(coordinator, tmp_path, shape)
    running = asyncio.create_task(collector.run())
    try:
        await send_part(one, 5, "worker-0", payloads(TENSORS), {"step": 5}, timeout_s=5)
        await two.send("coordinator", (SAVE, 5, "worker-1"), pack_manifest(payloads(TENSORS), {"step": 5}))
        for name in ("model", "group-0", "worker-0"):
            await send_part(one, 5, name, payloads(TENSORS), {"step": 5, "new": True}, timeout_s=5, mark=(1, 2))
        await send_part(one, 5, "worker-2", {}, {"step": 5}, timeout_s=5)  # of the grid before: nobody waits for it
        await send_part(two, 5, "worker-1", {}, {"step": 5}, timeout_s=5, mark=(1, 2))
        assert await wait_committed(two, 5, timeout_s=5)
    finally:
        running.cancel()
        await asyncio.wait({running})
    kept = Checkpoint(tmp_path / "step-00000005")
    assert kept.shape == replace(shape, group_size=2)
    assert kept.part("worker-0")[1] == {"step": 5, "new": True}
    await asyncio.gather(*(each.close() for each in (coordinator, one, two)))


async def test_a_collector_that_takes_over_knows_on_which_grid_a_checkpoint_is_written(tmp_path: Path) -> None:
    shape, written = RunShape("allreduce", 1, 4, 0), bytearray()
    for number, parts in enumerate((("model", "group-0", "worker-0"), ("worker-1",))):
        network, journal = MemoryNetwork(), Records(written, None, lambda: None)
        coordinator, one = network.endpoint("coordinator"), network.endpoint("worker/0")
        one.add_peer("coordinator", coordinator.address)
        collector = CheckpointCollector(coordinator, tmp_path, shape, journal=journal)
        running = asyncio.create_task(collector.run())
        for name in parts:
            await send_part(one, 5, name, {}, {"step": 5}, timeout_s=5, mark=(3, 2))
        if number:
            assert await wait_committed(one, 5, timeout_s=5)
        journal.superseded = not number
        running.cancel()
        await asyncio.wait({running})
        await asyncio.gather(one.close(), coordinator.close())
    assert Checkpoint(tmp_path / "step-00000005").shape.group_size == 2
    assert not [name for name in journal.ledger if name.startswith(("grid/", "part/"))]
