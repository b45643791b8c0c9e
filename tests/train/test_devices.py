"""Devices: staging as CUDA does it, modelled ones, and arithmetic in other precisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.local_exchange import LocalExchange
from tests.train.staged import StagedDevice
from tests.train.test_replica import batches, step
from tests.train.world import Recipe, run, topology_of
from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.errors import UsageError
from zmqtrain.train.device.cpu import CpuDevice
from zmqtrain.train.device.make import make_device
from zmqtrain.train.device.profile import Profile
from zmqtrain.train.replica import ReplicaSettings, TorchReplica


class HostExchange(LocalExchange):
    """Updates the parameters on the host, as a server does, and gives the buckets back."""

    async def end_step(self) -> None:
        await self._all.wait()
        for bucket in self.replica.buckets:
            bucket.parameters.tensor.sub_(0.1 * bucket.gradients.tensor)  # type: ignore[attr-defined]
            self.replica.parameters_ready(bucket)


@pytest.mark.parametrize("exchange", [LocalExchange(), HostExchange()], ids=["local update", "update on the host"])
@pytest.mark.parametrize("make", [StagedDevice, CpuDevice], ids=["staged", "in place"])
async def test_training_through_staging_equals_training_without(exchange: LocalExchange, make: Any) -> None:
    def model_of() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()

    expected, model = model_of(), model_of()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in batches(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
    device = make()
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), device, ReplicaSettings(bucket_bytes=100))
    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)
    for index, (x, y) in enumerate(batches(5)):
        exchange.begin_step(index)
        await device.run(lambda index=index, x=x, y=y: step(replica, index, x, y))
        await exchange.end_step()
    await device.run(replica.take_all)
    for ours, theirs, bucket in zip(model.parameters(), expected.parameters(), replica.buckets, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
        assert bucket.parameters.tensor.isfinite().all()  # type: ignore[attr-defined]
    if device.staging is not None:
        assert device.staging.copies >= 5 * 2 * len(replica.buckets)
    await device.close(5)


STAGED: dict[str, dict[str, Any]] = {
    "allreduce": {"exchange": {"kind": "allreduce"}},
    "clipped": {"exchange": {"kind": "allreduce"}, "optimizer": {"clip_norm": 0.1}},
    "server": {"exchange": {"kind": "model_server", "staleness": "sync"}},
    "gossip": {"exchange": {"kind": "gossip"}, "compute": {"groups": 2, "group_size": 1}},
    "averaging": {"exchange": {"kind": "averaging"}, "compute": {"groups": 2, "group_size": 2}},
}


@pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
@pytest.mark.parametrize("kind", STAGED)
async def test_staged_workers_sum_in_the_hosts_memory(kind: str) -> None:
    """Gradients are copied to where they are summed, and the sums back; the numbers are those of workers without any of it."""
    losses, parameters = [], []
    for staged in (True, False):
        sections = {"compute": {"group_size": 3}, **STAGED[kind]}
        topology = topology_of(**sections | {"job": {"steps": 6}, "compute": {"batch_size": 24, **sections["compute"]}})
        devices: list[StagedDevice] = []

        def make(_role: object, devices: list[StagedDevice] = devices) -> StagedDevice:
            devices.append(StagedDevice(delay_s=1e-4))
            return devices[-1]

        region = Arena.create(8, 1 << 20) if staged else None
        recipe = Recipe()
        result = await run(topology, recipe, region=region, make_device=make if staged else None)
        assert not result.errors
        losses.append(result.losses("worker/1"))
        parameters.append(recipe.parameters("worker/0"))
        assert all(device.staging.copies >= 6 * 2 for device in devices)
        for device in devices:
            assert sorted(device.staging.batches) == ["begun"] * 12 + ["used"] * 12
        if kind == "allreduce":  # rank 0's gradients, where the sums are, besides one's own; and losses
            buckets = result.recorders["worker/0"].of("start")[0]["buckets"]
            assert all(len(device.staging.pinned) == 3 * buckets + 1 for device in devices)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    torch.testing.assert_close(parameters[0], parameters[1], rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [2, 4])
async def test_workers_that_share_a_gpu_sum_in_pinned_memory(workers: int) -> None:
    losses = []
    for device in ("cuda:0", "cpu"):
        topology = topology_of(
            job={"steps": 6},
            compute={"group_size": workers, "batch_size": 24},
            hosts=[{"name": "here", "slots": workers, "devices": [device] * workers}],
            exchange={"kind": "allreduce"},
        )
        region = Arena.create(8, 1 << 20)
        result = await run(topology, Recipe(), region=region)
        assert not result.errors
        losses.append(result.losses("worker/1"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", ["allreduce", "model_server"])
async def test_a_cuda_device_trains_as_the_cpu_does(exchange: str) -> None:
    losses = []
    for device in ("cuda", "cpu"):
        topology = topology_of(
            job={"steps": 6}, compute={"group_size": 2, "batch_size": 24, "device": device}, exchange={"kind": exchange}
        )
        result = await run(topology, Recipe())
        assert not result.errors
        losses.append(result.losses("worker/1"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
async def test_mixed_precision_stays_near_float32(precision: str, tolerance: float) -> None:
    losses = []
    for name in (precision, "float32"):
        recipe = Recipe(torch.float32)
        topology = topology_of(job={"steps": 8}, compute={"group_size": 2, "batch_size": 24, "precision": name})
        result = await run(topology, recipe)
        assert not result.errors
        assert all(parameter.dtype == torch.float32 for parameter in recipe.models["worker/0"].parameters())
        losses.append(result.losses("worker/0"))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


PROFILE = {
    "layers": [{"name": f"layer{i}", "numel": 1000, "forward_s": 0.001, "backward_s": 0.002} for i in range(6)],
    "update_s": 0.001,
    "samples": 1000,
}


@pytest.mark.parametrize("exchange", [{"kind": "allreduce"}, {"kind": "model_server", "staleness": "async", "shards": 2}])
@pytest.mark.parametrize("overlap", [True, False])
async def test_a_modelled_device_needs_no_task_and_moves_real_bytes(
    exchange: dict[str, Any], overlap: bool, tmp_path: Path
) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    topology = topology_of(
        job={"steps": 4},
        compute={
            "groups": 2,
            "group_size": 2,
            "device": "modelled",
            "profile": str(tmp_path / "profile.json"),
            "overlap": overlap,
            "bucket_size": 4000,
        },
        exchange=exchange,
    )
    result = await run(topology, None)
    assert not result.errors
    events = result.recorders["worker/3"].of("step")
    assert len(events) == 4
    assert all(event["compute_s"] >= 6 * 0.003 - 1e-9 for event in events)
    assert result.recorders["worker/3"].of("start")[0]["buckets"] == 6


@pytest.mark.parametrize(
    "content", ["", "[]", '{"layers": []}', '{"layers": [{"name": "a"}]}', json.dumps(PROFILE | {"unknown": 1}), None]
)
def test_a_profile_that_is_none_is_an_error(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"profile\.json cannot be used"):
        Profile.load(path)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:99"])
def test_a_device_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match="device"):
        make_device(name)
